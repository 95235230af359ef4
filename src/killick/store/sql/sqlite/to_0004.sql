-- From format 3: an index counts an agent's runs by status, and a tag finds runs that wait for a person.

-- Used only to count an agent's runs by status.
CREATE INDEX runs_by_standing ON runs (agent, status, number, changed_at_us);

-- Every run that may wait for a person gets the tag. Readers check the run itself, and its next write or verification
-- corrects the tag.
INSERT OR IGNORE INTO tags (tag, number)
SELECT 'killick:asks', number FROM runs WHERE status IN ('waiting', 'running', 'paused') AND agent NOT GLOB 'killick.*';

UPDATE runs SET tags = substr(tags, 1, length(tags) - 1) || CASE tags WHEN '[]' THEN '' ELSE ',' END || '"killick:asks"]'
WHERE status IN ('waiting', 'running', 'paused') AND agent NOT GLOB 'killick.*' AND tags GLOB '[[]*]';
