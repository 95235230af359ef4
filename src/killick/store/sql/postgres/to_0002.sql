-- From format 1: an index counts an agent's runs by status, and a tag finds runs that wait for a person.

-- Used only to count an agent's runs by status.
CREATE INDEX heads_by_standing ON killick.heads (agent, status, number, changed_at_us) WHERE agent IS NOT NULL;

-- Every run that may wait for a person gets the tag. Readers check the run itself, and its next write or verification
-- corrects the tag.
INSERT INTO killick.tags (tag, number) SELECT 'killick:asks', number FROM killick.heads
WHERE status IN ('waiting', 'running', 'paused') AND NOT removed AND NOT starts_with(agent, 'killick.')
ON CONFLICT DO NOTHING;

UPDATE killick.heads SET tags = tags || 'killick:asks'::text
WHERE status IN ('waiting', 'running', 'paused') AND NOT removed AND NOT starts_with(agent, 'killick.');
