-- Run listings and counts, newest first.

local SCANNED_MAX = 5000
local PAGE = 200

local function set_of(list)
  if not list or #list == 0 then return nil end
  local set = {}
  for _, each in ipairs(list) do set[each] = true end
  return set
end

local function is_own(agent) return string.sub(agent, 1, #OWN) == OWN end

-- The sorted sets that contain a query's runs, or the held runs.
local function sources(query, statuses)
  if query.tag then return {P .. 'tag:' .. query.tag} end
  local keys = {}
  for _, stand in ipairs(call('SMEMBERS', P .. 'stands')) do
    local status, agent = string.match(stand, '^([^:]*):(.*)$')
    local fits = query.agent and agent == query.agent or (not query.agent and not is_own(agent))
    if fits and (not statuses or statuses[status]) then keys[#keys + 1] = P .. 'stand:' .. stand end
  end
  return keys
end

-- The newest names below a number, and the number above which the result is complete.
local function newest(keys, below)
  local names, floor, seen = {}, nil, {}
  for _, key in ipairs(keys) do
    local some = call('ZREVRANGEBYSCORE', key, '(' .. below, '-inf', 'LIMIT', 0, PAGE)
    for _, name in ipairs(some) do
      if not seen[name] then
        seen[name] = true
        names[#names + 1] = name
      end
    end
    if #some == PAGE and (not floor or some[PAGE] > floor) then floor = some[PAGE] end
  end
  return names, floor
end

local function held_by(holders, below)
  local names = {}
  for _, name in ipairs(call('ZRANGE', P .. 'held', 0, -1)) do
    if holders[call('HGET', P .. 'run:' .. run_of(name), 'holder')] then
      if tonumber(string.sub(name, 1, 16)) < below then names[#names + 1] = name end
    end
  end
  return names
end

local function matches(query, run, row, statuses, holders)
  if not row[2] or (statuses and not statuses[row[3]]) then return false end
  if query.agent then
    if row[2] ~= query.agent then return false end
  elseif not query.tag and is_own(row[2]) then
    return false
  end
  if query.since_us and tonumber(row[7]) < tonumber(query.since_us) then return false end
  if query.until_us and tonumber(row[7]) >= tonumber(query.until_us) then return false end
  if query.part and not string.find(string.lower(run), query.part, 1, true) then return false end
  if holders and not holders[call('HGET', P .. 'run:' .. run, 'holder')] then return false end
  if query.quarantined and not call('HGET', P .. 'run:' .. run, 'quarantined') then return false end
  return not query.tag or call('SISMEMBER', P .. 'tags:' .. run, query.tag) == 1
end

-- Passes on matches, newest first, until `found` has enough; returns the next cursor, if any.
local function scan(query, statuses, found)
  local holders, below, scanned = set_of(query.holders), tonumber(query.below), 0
  local keys = not (holders and not query.tag) and sources(query, statuses)
  while true do
    local names, floor
    if keys then names, floor = newest(keys, int(below)) else names = held_by(holders, below) end
    table.sort(names, function(one, other) return one > other end)
    for _, name in ipairs(names) do
      if floor and name < floor then break end
      local run = run_of(name)
      local row = row_of(run)
      if matches(query, run, row, statuses, holders) and found(run, row) then return nil end
    end
    scanned = scanned + #names
    if not floor then return nil end
    below = tonumber(string.sub(floor, 1, 16))
    if scanned >= SCANNED_MAX then return int(below) end
  end
end

-- name: listed
local rows = {}
if args.limit <= 0 then return {rows, false} end
local on = scan(args, set_of(args.status), function(run, row)
  rows[#rows + 1] = {run, row}
  return #rows >= args.limit
end)
return {rows, on or false}

-- name: counted
local counts, names, flat = {}, {}, {}
local function add(status, count)
  if not counts[status] then names[#names + 1] = status end
  counts[status] = (counts[status] or 0) + count
end
local on = nil
if args.tag or args.part or args.since_us or args.until_us or args.quarantined or (args.holders and #args.holders > 0) then
  on = scan(args, nil, function(_, row) add(row[3], 1) end)
else
  for _, key in ipairs(sources(args, nil)) do
    add(string.match(string.sub(key, #P + #'stand:' + 1), '^([^:]*):'), call('ZCARD', key))
  end
end
for at, status in ipairs(names) do flat[at] = {status, counts[status]} end
return {flat, on or false}

-- name: agents
local found = {}
for _, stand in ipairs(call('SMEMBERS', P .. 'stands')) do
  local agent = string.match(stand, '^[^:]*:(.*)$')
  if not is_own(agent) then found[#found + 1] = agent end
end
return found

-- name: index
local h = head_of(args.run)
return h and {h.run, row_of(h.run)}

-- name: run_statuses
local found = {}
for _, run in ipairs(args.runs) do
  local h = head_of(run)
  if h then
    local index = index_of(run)
    found[#found + 1] = {shown(h), index.status or false, index.quarantined or false, call('HLEN', P .. 'mail:' .. run)}
  end
end
return found

-- name: owned
local found, first = {}, args.space .. '\0' .. blob(args.prefix)
for at, name in ipairs(call('ZRANGEBYLEX', P .. 'owned', '[' .. first, '(' .. first .. string.rep('\255', 64))) do
  local key = string.sub(name, #args.space + 2)
  local owner = unsealed(call('HGET', P .. 'claims', packed(2, args.space, key)))
  found[at] = {key, owner[1], owner[2]}
end
return found

-- name: claimed
local found = {}
for at, field in ipairs(head_of(args.run) and call('SMEMBERS', P .. 'claimed:' .. args.run) or {}) do
  local claim = unpacked(field)
  local owner = call('HGET', P .. 'claims', field)
  if owner then found[#found + 1] = {claim[1], claim[2], unsealed(owner)[2]} end
end
return found

-- name: unindexed
local found = {}
for _, name in ipairs(call('ZRANGEBYSCORE', P .. 'unmarked', '(' .. args.after, '+inf', 'LIMIT', 0, args.limit)) do
  local h = head_of(run_of(name))
  if h then
    found[#found + 1] = {h.number, h.run, int(h.base), call('HGET', P .. 'run:' .. h.run, 'marked') or int(h.base)}
  end
end
return found

-- name: index_terms
for _, item in ipairs(args) do
  local h = head_of(item.run)
  if h and item.anew then forget_marks(h) end
  local at = h and tonumber(call('HGET', P .. 'run:' .. h.run, 'marked') or h.base)
  if h and at == item.after then
    for _, mark in ipairs(item.marks) do
      local seq = int(mark[3])
      if call('SADD', P .. 'marks:' .. h.run, mark[1] .. ':' .. mark[2] .. ':' .. seq) == 1 then
        call('ZADD', P .. 'mark:' .. mark[1], mark[2], mark_name(h, seq))
      end
    end
    call('HSET', P .. 'run:' .. h.run, 'marked', int(item.up_to))
    at = item.up_to
  end
  if h and at < h.seq then
    call('ZADD', P .. 'unmarked', h.number, member(h))
  elseif h then
    call('ZREM', P .. 'unmarked', member(h))
  end
end
return 1

-- name: search
-- Each group in turn names its newest position and the others skip to it, so the cost is bounded by the rarest group.
local STEPS_MAX = 20000

-- The newest position of a term at or before another, or strictly before it.
local function newest_of(term, at_us, name, strictly)
  local from, size = 0, 16
  while true do
    local some = call('ZREVRANGEBYSCORE', P .. 'mark:' .. term, at_us, '-inf', 'WITHSCORES', 'LIMIT', from, size)
    if #some == 0 then return nil end
    for at = 1, #some, 2 do
      local same = at_us ~= '+inf' and tonumber(some[at + 1]) == tonumber(at_us)
      if not same or some[at] < name or (some[at] == name and not strictly) then return some[at + 1], some[at] end
    end
    from, size = from + size, size * 2
  end
end

local function newest_in(group, at_us, name, strictly)
  local best_at, best
  for _, term in ipairs(group) do
    local found_at, found = newest_of(term, at_us, name, strictly)
    if found and (not best or tonumber(found_at) > tonumber(best_at) or (found_at == best_at and found > best)) then
      best_at, best = found_at, found
    end
  end
  return best_at, best
end

local places, at_us, name, strictly, agreed, turn = {}, args.at_us, args.name, true, 0, 0
for _ = 1, STEPS_MAX do
  if #places >= args.limit or #args.all_of == 0 then return {places, false} end
  local found_at, found = newest_in(args.all_of[turn % #args.all_of + 1], at_us, name, strictly)
  if not found or (args.since_us and tonumber(found_at) < tonumber(args.since_us)) then return {places, false} end
  turn = turn + 1
  agreed = not strictly and found == name and found_at == at_us and agreed + 1 or 1
  at_us, name, strictly = found_at, found, false
  if agreed == #args.all_of then
    local number = int(tonumber(string.sub(name, 1, 16)))
    local run = call('HGET', P .. 'names', number)
    if run then places[#places + 1] = {at_us, number, int(tonumber(string.sub(name, 17))), run} end
    strictly, agreed = true, 0
  end
end
return {places, {at_us, name, strictly and 1 or 0}}
