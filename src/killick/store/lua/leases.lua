-- Leases and due runs.

-- Leases a run to a holder. `nonce` identifies the request, so that a repeated request gets the same result.
local function take(h, holder, lease_us, nonce)
  local key = P .. 'run:' .. h.run
  call('HSET', key, 'took', nonce)
  put_or_drop(key, 'left', h.holder)
  put_or_drop(key, 'left_until', h.holder and h.till)
  h.epoch, h.holder = h.epoch + 1, holder
  h.till = lease_us and int(now_us() + lease_us) or nil
  put_head(h)
  settle(h)
end

local function agent_filter(agents)
  if not agents then return function() return true end end
  local set = {}
  for _, agent in ipairs(agents) do set[agent] = true end
  return function(agent) return set[agent] end
end

-- Abandoned runs: their lease expired.
local function abandoned(accepts, now)
  local found = {}
  for _, name in ipairs(call('ZRANGEBYSCORE', P .. 'held', '-inf', int(now_us()))) do
    local run = run_of(name)
    local index = index_of(run)
    if index.agent and not index.quarantined and not ENDED[index.status] and accepts(index.agent) then
      local since = index.changed
      if index.status == 'paused' then since = index.wake and tonumber(index.wake) <= now and index.wake end
      if since then
        found[#found + 1] = {
          priority = tonumber(index.priority), since = tonumber(since), name = name, run = run, agent = index.agent,
          lane = tonumber(index.lane),
        }
      end
    end
  end
  return found
end

local function is_before(one, other)
  if one.priority ~= other.priority then return one.priority > other.priority end
  if one.turn ~= other.turn then return one.turn < other.turn end
  if one.place ~= other.place then return one.place < other.place end
  if one.since ~= other.since then return one.since < other.since end
  return one.name < other.name
end

-- Sorts due runs: lanes of one priority take turns, from the one after a lane on; a lane's runs by age.
local function put_in_turns(found, after)
  local turns = {}
  for _, one in ipairs(found) do one.turn, one.place = 0, 0 end
  table.sort(found, is_before)
  for _, one in ipairs(found) do
    local line = one.priority .. ':' .. one.lane
    turns[line] = (turns[line] or 0) + 1
    one.turn, one.place = turns[line], (one.lane - after + 63) % 64
  end
  table.sort(found, is_before)
end

-- The first due runs, in order; `room` limits the number for some agents.
local function due(accepts, now, limit, room, after)
  if limit <= 0 then return {} end
  local found, queues, enough = abandoned(accepts, now), {}, 0
  for _, queue in ipairs(call('SMEMBERS', P .. 'lines')) do
    local priority, lane, agent = string.match(queue, '^(-?%d+):(%d+):(.*)$')
    if accepts(agent) then
      queues[#queues + 1] = {priority = tonumber(priority), lane = tonumber(lane), agent = agent, key = queue}
    end
  end
  table.sort(queues, function(one, other)
    if one.priority ~= other.priority then return one.priority > other.priority end
    return one.key < other.key
  end)
  for at, queue in ipairs(queues) do
    -- A run below enough runs of higher priority is not among the first.
    if enough >= limit and queue.priority < queues[at - 1].priority then break end
    local most = math.min(limit, room[queue.agent] or limit)
    local some = most > 0 and call('ZRANGEBYSCORE', P .. 'line:' .. queue.key, '-inf', int(now), 'WITHSCORES', 'LIMIT', 0,
      most) or {}
    for each = 1, #some, 2 do
      enough = enough + (room[queue.agent] and 0 or 1)
      found[#found + 1] = {
        priority = queue.priority, since = tonumber(some[each + 1]), name = some[each], run = run_of(some[each]),
        agent = queue.agent, lane = queue.lane,
      }
    end
  end
  put_in_turns(found, after)
  local first, rest = {}, {}
  for agent, most in pairs(room) do rest[agent] = most end
  for _, one in ipairs(found) do
    if #first >= limit then break end
    if (rest[one.agent] or 1) > 0 then
      if rest[one.agent] then rest[one.agent] = rest[one.agent] - 1 end
      first[#first + 1] = one
    end
  end
  return first
end

-- name: lease
local h = head_of(args.run)
if not h then return {'unknown'} end
if h.holder ~= args.holder or call('HGET', P .. 'run:' .. h.run, 'took') ~= args.nonce then
  if h.epoch ~= args.handed and lease_end(h) > now_us() then return {'busy', h.holder} end
  take(h, args.holder, args.lease_us, args.nonce)
end
return {'held', shown(h)}

-- name: claim
local taken, runs = {}, {}
-- A repeated request first gets the runs that the lost reply granted.
for _, name in ipairs(args.again and call('ZRANGE', P .. 'held', 0, -1) or {}) do
  if call('HGET', P .. 'run:' .. run_of(name), 'took') == args.nonce then runs[#runs + 1] = run_of(name) end
end
if #runs == 0 then
  for at, one in ipairs(due(agent_filter(args.agents), tonumber(args.now_us), args.limit, args.room, args.lane)) do
    runs[at] = one.run
    take(head_of(one.run), args.holder, args.lease_us, args.nonce)
  end
end
for at, run in ipairs(runs) do
  local before = call('HMGET', P .. 'run:' .. run, 'left', 'left_until')
  taken[at] = {shown(head_of(run)), row_of(run), before[1], before[2]}
end
return taken

-- name: renew
local now, kept = now_us(), {}
for _, run in ipairs(args.runs) do
  local h = head_of(run)
  if h and h.holder == args.holder and lease_end(h) > now then
    h.till = args.lease_us and int(now + args.lease_us) or nil
    put_head(h)
    call('ZADD', P .. 'held', h.till or '+inf', member(h))
    kept[#kept + 1] = {run, int(h.epoch)}
  end
end
return kept

-- name: release
local h = head_of(args.run)
if not h or not h.holder or h.epoch ~= args.epoch or (args.holder and args.holder ~= h.holder) then return 0 end
if args.left then h.till = int(0) else h.holder, h.till = nil, nil end
put_head(h)
local index = settle(h)
if args.left or (index.wake and not ENDED[index.status]) then notify({h.run}) end
return 1

-- name: holders
local found = {}
for at, name in ipairs(call('ZRANGE', P .. 'held', 0, -1)) do
  local h = head_of(run_of(name))
  if h and h.holder then found[#found + 1] = {h.holder, h.till or false} end
end
return {int(now_us()), found}

-- name: due
local rows = {}
for at, one in ipairs(due(agent_filter(args.agents), tonumber(args.now_us), args.limit, {}, 63)) do
  rows[at] = {one.run, row_of(one.run)}
end
return rows

-- name: soonest
local soonest, accepts = false, agent_filter(args.agents)
for _, queue in ipairs(call('SMEMBERS', P .. 'lines')) do
  if accepts(string.match(queue, '^-?%d+:%d+:(.*)$')) then
    local first = call('ZRANGE', P .. 'line:' .. queue, 0, 0)[1]
    local wake = first and call('HGET', P .. 'run:' .. run_of(first), 'wake')
    if wake and (not soonest or tonumber(wake) < tonumber(soonest)) then soonest = wake end
  end
end
return soonest

-- name: now_us
return int(now_us())

-- name: take_tokens
-- A bucket is a key that expires when it is full.
local now, wait, full = now_us(), 0, {}
for id, each in pairs(args.buckets) do
  local since = tonumber(call('GET', P .. 'rate:' .. id) or now)
  full[id] = math.min(math.max(since, now), now + each[2]) + each[1]
  wait = math.max(wait, full[id] - now - each[2])
end
if wait > 0 then return int(wait) end
for id, at in pairs(full) do
  call('SET', P .. 'rate:' .. id, int(at), 'PX', int(math.ceil((at - now) / 1000)))
end
return '0'
