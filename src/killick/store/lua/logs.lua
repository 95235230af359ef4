-- Appends, messages, and reads of both.

-- name: append
-- Every item is a group: an append and its companions. A refused group has written nothing.
local notified, results = {}, {}

local function refused(...) return {0, ...} end

-- The chain hash at an event, from the run or its ancestors.
local function hash_at(h, seq)
  if seq > h.seq then return nil end
  while h and seq <= h.base and h.parent do h = head_of(h.parent) end
  local found = h and event(h.run, seq)
  return found and found[4]
end

local function new_head(item, create)
  local h = {run = item.run, seq = 0, hash = blob(item.before), epoch = 0, base = item.after, parent = create.parent}
  if create.parent then
    local parent = head_of(create.parent)
    if not parent then return nil, refused('RunUnknown', create.parent) end
    if hash_at(parent, item.after) ~= h.hash then
      return nil, refused('HeadMoved', create.parent, int(item.after), int(parent.seq))
    end
  elseif item.after ~= 0 then
    return nil, refused('HeadMoved', item.run, int(item.after), '0')
  end
  if create.holder then
    h.epoch, h.holder = 1, create.holder
    h.till = create.lease_us and int(now_us() + create.lease_us)
  end
  return h
end

-- The head that an append builds on, or a refusal.
local function base_head(item, h)
  if item.create then
    if h then return nil, refused('RunExists', item.run) end
    return new_head(item, item.create)
  end
  if not h or h.removed then return nil, refused('RunUnknown', item.run) end
  if h.epoch ~= item.epoch then
    return nil, refused('EpochStale', item.run, int(item.epoch), int(h.epoch))
  end
  if h.seq ~= item.after or h.hash ~= blob(item.before) then
    return nil, refused('HeadMoved', item.run, int(item.after), int(h.seq))
  end
  return h
end

local function refusal_of_rights(item, claimed)
  local given_back, returned = {}, {}
  for _, claim in ipairs(item.releases or {}) do given_back[packed(2, claim[1], blob(claim[2]))] = true end
  for _, claim in ipairs(item.claims or {}) do
    local field = packed(2, claim[1], blob(claim[2]))
    local owner = claimed[field]
    if not owner then
      local found = call('HGET', P .. 'claims', field)
      owner = found and unsealed(found)
    end
    if owner and not (owner[1] == item.run and given_back[field]) then
      return refused('AlreadyClaimed', item.run, claim[1], owner[1] or '', owner[2] or '0')
    end
    claimed[field] = {item.run, int(item.last)}
  end
  for _, number in ipairs(item.returns or {}) do returned[number] = true end
  for _, number in ipairs(item.takes or {}) do
    local found = message(item.run, int(number))
    if not found or not found[5] or (found[6] and not returned[number]) then return refused('MessageGone', item.run, int(number)) end
  end
  if item.inbox_read then
    local names = {}
    for _, name in ipairs(item.inbox_read[2]) do names[name] = true end
    for number = item.inbox_read[1] + 1, call('HLEN', P .. 'mail:' .. item.run) do
      local found = message(item.run, int(number))
      if found and names[found[2]] then return refused('InboxMoved', item.run, int(number)) end
    end
  end
end

-- An event beyond the head did not come from an append: it must not be overwritten or extended.
local function refusal_of_place(item)
  local last = item.rows[1] and call('XREVRANGE', P .. 'log:' .. item.run, '+', '-', 'COUNT', 1)[1]
  if last and tonumber(string.match(last[1], '^(%d+)')) > item.after then
    return refused('RunBroken', item.run, int(item.after + 1))
  end
end

local function put_rights(item)
  local run, seq = item.run, int(item.last)
  for _, claim in ipairs(item.releases or {}) do
    local field = packed(2, claim[1], blob(claim[2]))
    if call('SREM', P .. 'claimed:' .. run, field) == 1 then
      call('HDEL', P .. 'claims', field)
      call('ZREM', P .. 'owned', claim[1] .. '\0' .. blob(claim[2]))
    end
  end
  for _, claim in ipairs(item.claims or {}) do
    local field = packed(2, claim[1], blob(claim[2]))
    call('HSET', P .. 'claims', field, sealed(field, packed(2, run, seq)))
    call('SADD', P .. 'claimed:' .. run, field)
    call('ZADD', P .. 'owned', 0, claim[1] .. '\0' .. blob(claim[2]))
  end
  for at, numbers in ipairs({item.returns or {}, item.takes or {}}) do
    for _, each in ipairs(numbers) do
      local number = int(each)
      local found = message(run, number)
      if found and found[5] then
        found[6] = at == 2 and seq or nil
        put_message(run, number, found)
      end
    end
  end
end

local function erase(item)
  local run, erased = item.run, {}
  for _, seq in ipairs(item.erases_rows or {}) do
    erased[int(seq)] = true
    call('HDEL', P .. 'data:' .. run, int(seq))
  end
  if item.erases_rows then
    for at, text in ipairs(call('LRANGE', P .. 'aside:' .. run, 0, -1)) do
      local row = unsealed(text)
      if erased[row[1]] and row[4] then
        call('LSET', P .. 'aside:' .. run, at - 1, sealed(run .. ':', packed(4, row[1], row[2], row[3], nil)))
      end
    end
  end
  for _, each in ipairs(item.erases_messages or {}) do
    local number = int(each)
    local found = message(run, number)
    if found and found[5] then
      found[3] = '{"$erased":""}'
      put_message(run, number, found)
    end
  end
  for _, place in ipairs(item.erases_pieces or {}) do
    local hash = blob(place)
    local found = call('HGET', P .. 'pieces', hash)
    if found and call('SADD', P .. 'erased', hash) == 1 then
      call('HSET', P .. 'pieces', hash, string.match(found, '^([^\n]*)'))
    end
  end
end

local function write(item, h)
  local run = item.run
  if item.create then
    h.number = int(call('INCR', P .. 'created'))
    call('ZADD', P .. 'runs', h.number, member(h))
    call('HSET', P .. 'names', h.number, run)
    if h.parent then call('SADD', P .. 'forks:' .. h.parent, run) end
  end
  h.seq, h.hash = item.last, blob(item.last_hash)
  put_rows(run, item.rows)
  store_pieces(item.pieces, P .. 'uses:' .. run)
  put_rights(item)
  local shot = item.snapshot
  if shot then
    store_pieces(shot.pieces, P .. 'shot_uses:' .. run)
    call('HSET', P .. 'shots:' .. run, shot.name, blob(shot.hash) .. blob(shot.root))
  end
  erase(item)
  put_slots(run, item.slots)
  for _, slot in ipairs(item.gives or {}) do add_places(run, slot, 1) end
  put_outbox(run, item.outbox, notified)
  local ended = item.index and ENDED[item.index.status]
  if ended then h.holder, h.till = nil, nil end
  put_head(h)
  if item.index then
    local before = call('HGET', P .. 'run:' .. run, 'wake')
    local wake = put_index(h, item.index)
    if wake and not ended and not h.holder and not (before and tonumber(before) <= tonumber(wake)) then
      notified[#notified + 1] = run
    end
  end
  if item.index or item.create then settle(h) end
  if item.create and h.seq > h.base or item.rows[1] then call('ZADD', P .. 'unmarked', h.number, member(h)) end
end

-- This append was committed before. Two creators may send the same event; only the current holder is the creator.
local function is_there(item, h)
  if not h or h.removed or not item.rows[1] or h.seq ~= item.last or h.hash ~= blob(item.last_hash) then return false end
  return not item.create or (item.create.holder and item.create.holder == h.holder)
end

local function appended(group)
  local heads, claimed = {}, {}
  for at, item in ipairs(group) do
    local found = any_head(item.run)
    if at == 1 and is_there(item, found) then return {1, shown(found)} end
    local h, refusal = base_head(item, found)
    refusal = refusal or refusal_of_rights(item, claimed) or refusal_of_place(item)
    if refusal then return refusal end
    heads[at] = h
  end
  for at, item in ipairs(group) do write(item, heads[at]) end
  if group[1].renews then move_messages(group[1].run, group[1].renews, group[1].last, notified) end
  for _, item in ipairs(group) do
    for _, sent in ipairs(item.sends or {}) do
      if sent.waits_for then sent.run = first_waiting(sent.waits_for, sent.at_us) end
      if sent.run then deliver(sent, notified) end
    end
  end
  return {1, shown(heads[1])}
end

for at, group in ipairs(args) do results[at] = appended(group) end
notify(notified)
return results

-- name: acknowledged
-- For a resent batch: whether an event is in the log unchanged, under the current epoch.
local h = head_of(args.run)
local found = h and h.epoch == args.epoch and event(args.run, args.seq)
if found and found[4] == blob(args.hash) then return shown(h) end
return false

-- name: deliver
local notified, results = {}, {}
for at, sent in ipairs(args) do results[at] = deliver(sent, notified) end
notify(notified)
return results

-- name: head
local h = head_of(args.run)
return h and shown(h)

-- name: heads
local heads = {}
for _, name in ipairs(call('ZRANGEBYSCORE', P .. 'runs', '(' .. args.after, '+inf', 'LIMIT', 0, args.limit)) do
  local h = head_of(run_of(name))
  if h then heads[#heads + 1] = shown(h) end
end
return heads

-- name: read
if not head_of(args.run) then return {} end
return events(args.run, args.after, args.limit, args.data)

-- name: row
local found = head_of(args.run) and event(args.run, args.seq)
return found and {int(args.seq), found[2], found[4], call('HGET', P .. 'data:' .. args.run, int(args.seq))}

-- name: opening
local h = head_of(args.run)
if not h then return false end
local newest, shot = -1, false
local shots = call('HGETALL', P .. 'shots:' .. h.run)
for at = 1, #shots, 2 do
  local seq, fold = string.match(shots[at], '^(%d+):(%d+)$')
  if tonumber(fold) == args.fold and tonumber(seq) <= h.seq and tonumber(seq) > newest then
    newest, shot = tonumber(seq), {shots[at], shots[at + 1]}
  end
end
local reason = call('HGET', P .. 'run:' .. h.run, 'quarantined')
return {shown(h), reason, shot, events(h.run, math.max(newest, 0), nil, true)}

-- name: inbox
-- Messages in order: unconsumed ones, with a name if given; or all.
if not head_of(args.run) then return {} end
local found, key = {}, P .. 'mail:' .. args.run
if args.all then
  local numbers = call('HKEYS', key)
  table.sort(numbers, function(one, other) return tonumber(one) < tonumber(other) end)
  for _, number in ipairs(numbers) do found[#found + 1] = {number, call('HGET', key, number)} end
  return found
end
for _, number in ipairs(call('ZRANGEBYSCORE', P .. 'untaken:' .. args.run, '(' .. args.after, '+inf')) do
  if #found >= args.limit then break end
  local text = call('HGET', key, number)
  if text and (not args.name or unsealed(text)[2] == args.name) then found[#found + 1] = {number, text} end
end
return found

-- name: message
local number = head_of(args.run) and call('HGET', P .. 'mail_ids:' .. args.run, args.id)
return number and {number, call('HGET', P .. 'mail:' .. args.run, number)}

-- name: outbox
-- Outbox pages. With a filter a page may be empty, and returns the next position.
local found, kinds, after = {}, args.kinds and {}, args.after
for _, kind in ipairs(args.kinds or {}) do kinds[kind] = true end
local page = call('XRANGE', P .. 'feed', after .. '-1', '+', 'COUNT', args.limit)
for _, entry in ipairs(page) do
  local position = string.match(entry[1], '^(%d+)')
  after = position
  if not kinds or kinds[entry[2][6]] then found[#found + 1] = {position, entry[2][2], entry[2][4], entry[2][6]} end
end
return {found, #page == args.limit and after or false}

-- name: trim_outbox
for _, entry in ipairs(call('XRANGE', P .. 'feed', '-', args.up_to .. '-0')) do
  call('SREM', P .. 'telling:' .. entry[2][2], (string.match(entry[1], '^(%d+)')))
end
return call('XTRIM', P .. 'feed', 'MINID', args.up_to .. '-1')
