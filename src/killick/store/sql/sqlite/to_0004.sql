-- From format 3: how many runs an agent has of each status is counted in an index of its own, and what waits for a
-- person is found by a tag.

-- How many runs an agent has of each status is counted here alone.
CREATE INDEX runs_by_standing ON runs (agent, status, number, changed_at_us);

-- Every run that may have asked somebody gets the tag: whoever finds it looks at the run itself, and what the run
-- writes next, or its verification, says how it is.
INSERT OR IGNORE INTO tags (tag, number)
SELECT 'killick:asks', number FROM runs WHERE status IN ('waiting', 'running', 'paused') AND agent NOT GLOB 'killick.*';

UPDATE runs SET tags = substr(tags, 1, length(tags) - 1) || CASE tags WHEN '[]' THEN '' ELSE ',' END || '"killick:asks"]'
WHERE status IN ('waiting', 'running', 'paused') AND agent NOT GLOB 'killick.*' AND tags GLOB '[[]*]';
