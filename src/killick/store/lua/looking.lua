-- Re-reads the store and reports damage. Changes nothing.

-- name: look_at_runs
-- All problems of some runs in one atomic read: {run, where, what} each.
local wrong, run = {}, nil
local function say(where, what) wrong[#wrong + 1] = {run, where, what} end

local function look_at_head(h)
  if call('HGET', P .. 'run:' .. run, 'check') ~= head_check(h) then
    say('heads', 'the head is not as it was written')
  end
  if h.removed then return end
  if call('HGET', P .. 'names', h.number) ~= run or not call('ZSCORE', P .. 'runs', member(h)) then
    say('places', 'it is not found by its number')
  end
  local last = call('XREVRANGE', P .. 'log:' .. run, '+', '-', 'COUNT', 1)[1]
  if h.seq > h.base and (not last or last[1] ~= int(h.seq) .. '-0') then say('log', 'its events end elsewhere') end
end

-- A message to a renewal is found by the chain too, among those of its other logs.
local function is_in_chain(found)
  local logs = found[7] and call('HGET', P .. 'chain:' .. found[7], found[1])
  for _, log in ipairs(logs and unpacked(logs) or {}) do
    if log == run then return true end
  end
  return not found[7]
end

local function look_at_mail()
  local total, untaken = call('HLEN', P .. 'mail:' .. run), 0
  for number = 1, total do
    local text = call('HGET', P .. 'mail:' .. run, int(number))
    if not text then
      say('inbox', 'message ' .. int(number) .. ' is gone')
    elseif sealed(run .. ':' .. int(number) .. ':', string.sub(text, 9)) ~= text then
      say('inbox', 'message ' .. int(number) .. ' is not as it was written')
    else
      local found = unsealed(text)
      if not found[6] then untaken = untaken + 1 end
      if (call('ZSCORE', P .. 'untaken:' .. run, int(number)) and true or false) == (found[6] and true or false)
        or call('HGET', P .. 'mail_ids:' .. run, found[1]) ~= int(number) or not is_in_chain(found) then
        say('inbox', 'message ' .. int(number) .. ' is not found as it stands')
      end
    end
  end
  if call('ZCARD', P .. 'untaken:' .. run) ~= untaken then say('inbox', 'messages are found that are not there') end
end

local function look_at_slots()
  local slots = call('HGETALL', P .. 'slots:' .. run)
  for at = 1, #slots, 2 do
    if sealed(run .. ':' .. slots[at] .. ':', string.sub(slots[at + 1], 9)) ~= slots[at + 1] then
      say('slots', 'slot ' .. slots[at] .. ' is not as it was written')
    end
  end
end

local function look_at_rest()
  for at, text in ipairs(call('LRANGE', P .. 'aside:' .. run, 0, -1)) do
    if sealed(run .. ':', string.sub(text, 9)) ~= text then
      say('aside', 'row ' .. int(at) .. ' is not as it was written')
    end
  end
  for _, field in ipairs(call('SMEMBERS', P .. 'claimed:' .. run)) do
    local text = call('HGET', P .. 'claims', field)
    if not text or unsealed(text)[1] ~= run then say('claims', 'a claim of it is gone') end
  end
end

-- A run's set memberships are derived from its head and its index.
local function look_at_places(h)
  local name = member(h)
  local index = index_of(run)
  local line, stand = line_of(h, index), index.agent and (index.status .. ':' .. index.agent)
  local placed = index.line == line and index.stand == stand
  placed = placed and (not line or call('ZSCORE', P .. 'line:' .. line, name) and call('SISMEMBER', P .. 'lines', line) == 1)
  placed = placed and
    (not stand or call('ZSCORE', P .. 'stand:' .. stand, name) and call('SISMEMBER', P .. 'stands', stand) == 1)
  placed = placed and (call('ZSCORE', P .. 'held', name) and true or false) == (h.holder and true or false)
  if not placed then say('places', 'it is not found where it belongs') end
  for _, tag in ipairs(call('SMEMBERS', P .. 'tags:' .. run)) do
    if not call('ZSCORE', P .. 'tag:' .. tag, name) then say('tags', 'it is not found by its tag ' .. tag) end
  end
  local marks = true
  for _, mark in ipairs(call('SMEMBERS', P .. 'marks:' .. run)) do
    local term, at_us, seq = string.match(mark, '^(-?%d+):(-?%d+):(%d+)$')
    local score = term and call('ZSCORE', P .. 'mark:' .. term, mark_name(h, seq))
    marks = marks and score and tonumber(score) == tonumber(at_us)
  end
  if not marks then say('marks', 'the search terms are not as they were written') end
end

for _, each in ipairs(args.runs) do
  run = each
  local h = any_head(run)
  if h then
    look_at_head(h)
    if not h.removed then
      look_at_mail()
      look_at_slots()
      look_at_rest()
      look_at_places(h)
    end
  end
end
return wrong

-- name: settle_run
-- Rewrites a run's set memberships, and lets its search terms be rebuilt.
local h = head_of(args.run)
if not h then return 0 end
local name, key = member(h), P .. 'run:' .. args.run
call('HDEL', key, 'line', 'stand')
settle(h)
call('ZADD', P .. 'runs', h.number, name)
call('HSET', P .. 'names', h.number, h.run)
for _, tag in ipairs(call('SMEMBERS', P .. 'tags:' .. h.run)) do call('ZADD', P .. 'tag:' .. tag, h.number, name) end
if args.marks then
  forget_marks(h)
  call('ZADD', P .. 'unmarked', h.number, name)
end
return 1

-- name: look_at_set
-- A page of a run set: members that do not belong there, which healing removes.
local key, kind, of = P .. args.key, args.kind, args.of
local page = call('ZSCAN', key, args.cursor, 'COUNT', 500)
local wrong = 0

local function belongs(name, score)
  if kind == 'mark' then
    local run = call('HGET', P .. 'names', int(tonumber(string.sub(name, 1, 16))))
    local mark = run and (of .. ':' .. int(tonumber(score)) .. ':' .. int(tonumber(string.sub(name, 17))))
    return mark and call('SISMEMBER', P .. 'marks:' .. run, mark) == 1
  end
  local h = head_of(run_of(name))
  if not h or member(h) ~= name then return false end
  local index = index_of(h.run)
  if kind == 'line' or kind == 'stand' then return index[kind] == of end
  if kind == 'tag' then return call('SISMEMBER', P .. 'tags:' .. h.run, of) == 1 end
  return kind ~= 'held' or h.holder
end

for at = 1, #page[2], 2 do
  if not belongs(page[2][at], page[2][at + 1]) then
    wrong = wrong + 1
    if args.heal then call('ZREM', key, page[2][at]) end
  end
end
return {page[1], wrong}

-- name: look_at_stray
-- Whether a key belongs to an unknown run; healing deletes derived keys.
if head_of(args.run) or call('EXISTS', P .. args.kind .. ':' .. args.run) == 0 then return 0 end
if args.heal then
  if args.kind == 'uses' or args.kind == 'shot_uses' then unuse_all(P .. args.kind .. ':' .. args.run) end
  call('DEL', P .. args.kind .. ':' .. args.run)
end
return 1

-- name: look_at_claims
-- A page of all claims.
local page = call('HSCAN', P .. 'claims', args.cursor, 'COUNT', 500)
local wrong = {}
for at = 1, #page[2], 2 do
  local field, text = page[2][at], page[2][at + 1]
  if sealed(field, string.sub(text, 9)) ~= text then wrong[#wrong + 1] = unpacked(field)[1] or '' end
end
return {page[1], wrong}

-- name: look_at_uses
-- Chunks with a wrong reference count, checked run by run.
local wrong = {}
for at, place in ipairs(args.hashes) do
  local hash, uses = blob(place), 0
  for _, name in ipairs(call('ZRANGE', P .. 'runs', 0, -1)) do
    uses = uses + call('SISMEMBER', P .. 'uses:' .. run_of(name), hash)
      + call('SISMEMBER', P .. 'shot_uses:' .. run_of(name), hash)
  end
  if int(uses) ~= (call('HGET', P .. 'refs', hash) or '0') then
    wrong[#wrong + 1] = int(at)
    if args.heal then
      if uses > 0 then call('HSET', P .. 'refs', hash, int(uses)) else call('HDEL', P .. 'refs', hash) end
      call(uses > 0 and 'SREM' or 'SADD', P .. 'unused', hash)
    end
  end
end
return wrong
