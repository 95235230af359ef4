-- From format 1: how many runs an agent has of each status is counted in an index of its own, and what waits for a
-- person is found by a tag.

-- How many runs an agent has of each status is counted here alone.
CREATE INDEX heads_by_standing ON killick.heads (agent, status, number, changed_at_us) WHERE agent IS NOT NULL;

-- Every run that may have asked somebody gets the tag: whoever finds it looks at the run itself, and what the run
-- writes next, or its verification, says how it is.
INSERT INTO killick.tags (tag, number) SELECT 'killick:asks', number FROM killick.heads
WHERE status IN ('waiting', 'running', 'paused') AND NOT removed AND NOT starts_with(agent, 'killick.')
ON CONFLICT DO NOTHING;

UPDATE killick.heads SET tags = tags || 'killick:asks'::text
WHERE status IN ('waiting', 'running', 'paused') AND NOT removed AND NOT starts_with(agent, 'killick.');
