-- Shared writes: chunks and references, messages, the index, the outbox, search terms.

local OUTBOX_CHANGED = 'killick:feed'

-- Changes a chunk's reference count. Unreferenced chunks wait for the sweep.
local function use(key, hash)
  if call('SADD', key, hash) == 1 and call('HINCRBY', P .. 'refs', hash, 1) == 1 then
    call('SREM', P .. 'unused', hash)
  end
end

local function unuse_all(key)
  for _, hash in ipairs(call('SMEMBERS', key)) do
    if call('HINCRBY', P .. 'refs', hash, -1) <= 0 then
      call('HDEL', P .. 'refs', hash)
      call('SADD', P .. 'unused', hash)
    end
  end
  call('DEL', key)
end

-- Stores new or erased values, and references all of them. An erased one keeps its codec.
local function store_pieces(pieces, key)
  for _, piece in ipairs(pieces or {}) do
    local hash, codec, body = blob(piece[1]), piece[2], blob(piece[3])
    if call('HSTRLEN', P .. 'pieces', hash) == 0 or (body and call('SREM', P .. 'erased', hash) == 1) then
      call('HSET', P .. 'pieces', hash, body and (codec .. '\n' .. body) or codec)
      if not body then call('SADD', P .. 'erased', hash) end
    end
    use(key, hash)
  end
end

-- id, name, body, by, at_us, taken, root, the hashes of its chunks
local function message(run, number)
  local found = call('HGET', P .. 'mail:' .. run, number)
  return found and unsealed(found)
end

local function put_message(run, number, m)
  local text = packed(8, m[1], m[2], m[3], m[4], m[5], m[6], m[7], m[8])
  call('HSET', P .. 'mail:' .. run, number, sealed(run .. ':' .. number .. ':', text))
  if m[6] then call('ZREM', P .. 'untaken:' .. run, number) else call('ZADD', P .. 'untaken:' .. run, number, number) end
end

local function count_mail(h, delivered)
  call('HSET', P .. 'run:' .. h.run, 'delivered', delivered, 'counted', check(packed(2, h.number, delivered)))
end

-- When a run is due that has a message. The sender's clock may be ahead: since its last change at the latest.
local function due_with(index, at_us)
  return index.changed and tonumber(index.changed) < tonumber(at_us) and index.changed or at_us
end

-- Puts a new message into an inbox, makes the run due, and returns its number.
local function receive(h, m, notified)
  local run, chain = h.run, m[7] and P .. 'chain:' .. m[7]
  -- A lost message keeps its number.
  local counted = tonumber(call('HGET', P .. 'run:' .. run, 'delivered') or 0)
  local number = int(math.max(call('HLEN', P .. 'mail:' .. run), counted) + 1)
  put_message(run, number, m)
  call('HSET', P .. 'mail_ids:' .. run, m[1], number)
  if chain then call('HSET', chain, m[1], packed(1, run) .. (call('HGET', chain, m[1]) or '')) end
  count_mail(h, number)
  local index = index_of(run)
  local due = due_with(index, m[5])
  if index.agent and not ENDED[index.status] and not (index.wake and tonumber(index.wake) <= tonumber(due)) then
    call('HSET', P .. 'run:' .. run, 'wake', due)
    settle(h)
  end
  notified[#notified + 1] = run
  return number
end

-- A slot of a run: its token and its places.
local function slot_of(run, name)
  local found = call('HGET', P .. 'slots:' .. run, name)
  local parts = found and unsealed(found)
  return parts and {token = parts[1] or '', places = tonumber(parts[2]) or 0}
end

local function put_slot(run, name, token, places)
  call('HSET', P .. 'slots:' .. run, name, sealed(run .. ':' .. name .. ':', packed(2, token, int(places))))
end

-- Writes slots and removes them, in order: {name, token, places} each, -1 places to remove it.
local function put_slots(run, slots)
  for _, slot in ipairs(slots or {}) do
    if slot[3] < 0 then call('HDEL', P .. 'slots:' .. run, slot[1]) else put_slot(run, slot[1], slot[2], slot[3]) end
  end
end

-- Gives places back to a slot, or takes them, if its token is still the same.
local function add_places(run, slot, sign)
  local found = slot_of(run, slot[1])
  if found and found.token == slot[2] then
    put_slot(run, slot[1], found.token, math.max(0, found.places + sign * slot[3]))
  end
end

-- The log of a chain of renewals that has a message, and its number there.
local function known_message(run, root, id)
  local number = call('HGET', P .. 'mail_ids:' .. run, id)
  if number or not root then return run, number end
  local logs = call('HGET', P .. 'chain:' .. root, id)
  local log = logs and unpacked(logs)[1] or root
  return log, call('HGET', P .. 'mail_ids:' .. log, id)
end

-- Why a run takes no such message.
local function refusal_of_delivery(run, sent)
  if sent.exact then return nil end
  local ended = slot_of(run, 'ended')
  if ended then return {2, 'DeliveryRefused', run, 'ended', ended.token} end
  local slot = sent.slot
  local found = slot and slot_of(run, slot[1])
  if slot and not (found and found.token == slot[2] and found.places > 0) then
    return {2, 'DeliveryRefused', run, slot[1], found and found.token or nil}
  end
end

-- Delivers a message to the last renewal of its run, if the slots there allow it: {fresh, run, number, message}, or
-- {2, refusal}.
local function deliver(sent, notified)
  local run = sent.run
  local renewed = not sent.exact and slot_of(run, 'renewed')
  while renewed do
    run = renewed.token
    renewed = slot_of(run, 'renewed')
  end
  local h = head_of(run)
  if not h then return {2, 'RunUnknown', run} end
  local root = slot_of(run, 'root')
  root = root and root.token
  local log, known = known_message(run, not sent.exact and root, sent.id)
  if known then return {0, log, known, call('HGET', P .. 'mail:' .. log, known)} end
  local refusal = refusal_of_delivery(run, sent)
  if refusal then return refusal end
  local hashes = {}
  for at, piece in ipairs(sent.pieces) do hashes[at] = blob(piece[1]) end
  local m = {sent.id, sent.name, blob(sent.body), sent.by, sent.at_us, nil, root, hashes[1] and table.concat(hashes)}
  local number = receive(h, m, notified)
  store_pieces(sent.pieces, P .. 'uses:' .. run)
  if sent.slot then add_places(run, sent.slot, -1) end
  return {1, run, number, call('HGET', P .. 'mail:' .. run, number)}
end

-- Moves what is in an inbox to the run that continues this one. A damaged message stays.
local function move_messages(run, renewed, seq, notified)
  local h, root = head_of(renewed), slot_of(renewed, 'root')
  if not h then return end
  for _, number in ipairs(call('ZRANGE', P .. 'untaken:' .. run, 0, -1)) do
    local m = message(run, number)
    if m and m[5] then
      m[6] = int(seq)
      put_message(run, number, m)
      m[6], m[7] = nil, root and root.token
      receive(h, m, notified)
      for at = 1, #(m[8] or ''), 32 do use(P .. 'uses:' .. renewed, string.sub(m[8], at, at + 31)) end
    end
  end
end

-- Takes a run's messages out of the chain of renewals.
local function leave_chain(run)
  local root = slot_of(run, 'root')
  local chain = root and P .. 'chain:' .. root.token
  for _, id in ipairs(chain and call('HKEYS', P .. 'mail_ids:' .. run) or {}) do
    local rest = {}
    for _, log in ipairs(unpacked(call('HGET', chain, id) or '')) do
      if log ~= run then rest[#rest + 1] = packed(1, log) end
    end
    put_or_drop(chain, id, rest[1] and table.concat(rest))
  end
end

-- The oldest run with a tag that no message has made due yet.
local function first_waiting(tag, at_us)
  local from, names = 0, nil
  repeat
    names = call('ZRANGE', P .. 'tag:' .. tag, from, from + 99)
    for _, name in ipairs(names) do
      local index = index_of(run_of(name))
      if not index.quarantined and not (index.wake and tonumber(index.wake) <= tonumber(at_us)) then return run_of(name) end
    end
    from = from + 100
  until #names < 100
end

-- The first unconsumed and unseen message makes a run due, unless it ended.
local function put_index(h, index)
  local run, wake = h.run, index.wake
  if not ENDED[index.status] then
    for _, number in ipairs(call('ZRANGEBYSCORE', P .. 'untaken:' .. run, '(' .. index.seen, '+inf')) do
      local found = message(run, number)
      local due = found and found[5] and due_with(index, found[5])
      if due and (not wake or tonumber(due) < tonumber(wake)) then wake = due end
    end
  end
  local key = P .. 'run:' .. run
  call('HSET', key, 'agent', index.agent, 'status', index.status, 'priority', index.priority, 'lane', index.lane, 'started', index.started,
    'changed', index.changed, 'tags', index.shown_tags)
  put_or_drop(key, 'wake', wake)
  if call('HEXISTS', key, 'delivered') == 0 then count_mail(h, int(call('HLEN', P .. 'mail:' .. run))) end
  local tags, name = {}, member(h)
  for _, tag in ipairs(index.tags) do tags[tag] = true end
  for _, tag in ipairs(call('SMEMBERS', P .. 'tags:' .. run)) do
    if not tags[tag] then
      call('SREM', P .. 'tags:' .. run, tag)
      call('ZREM', P .. 'tag:' .. tag, name)
    end
  end
  for tag in pairs(tags) do
    call('SADD', P .. 'tags:' .. run, tag)
    call('ZADD', P .. 'tag:' .. tag, h.number, name)
  end
  return wake
end

local function put_outbox(run, rows, notified)
  for _, each in ipairs(rows or {}) do
    local position = int(call('INCR', P .. 'outbox_end'))
    call('XADD', P .. 'feed', position .. '-0', 'r', run, 's', int(each[1]), 'k', each[2])
    call('SADD', P .. 'telling:' .. run, position)
    notified[#notified + 1] = OUTBOX_CHANGED
  end
end

-- A run's member name among search terms: ordered by time, creation and seq.
local function mark_name(h, seq) return padded(h.number, 16) .. padded(seq, 12) end

local function forget_marks(h)
  for _, mark in ipairs(call('SMEMBERS', P .. 'marks:' .. h.run)) do
    local term, _, seq = string.match(mark, '^(-?%d+):(-?%d+):(%d+)$')
    if term then call('ZREM', P .. 'mark:' .. term, mark_name(h, seq)) end
  end
  call('DEL', P .. 'marks:' .. h.run)
  call('HDEL', P .. 'run:' .. h.run, 'marked')
end

local function put_rows(run, rows)
  for _, row in ipairs(rows) do
    local seq = int(row[1])
    call('XADD', P .. 'log:' .. run, seq .. '-0', 'b', blob(row[2]), 'h', blob(row[3]))
    if row[4] then call('HSET', P .. 'data:' .. run, seq, blob(row[4])) end
  end
end

-- Events after a seq: seq, body, hash, data.
local function events(run, after, limit, with_data)
  local key = P .. 'log:' .. run
  local found = limit and call('XRANGE', key, int(after) .. '-1', '+', 'COUNT', limit)
    or call('XRANGE', key, int(after) .. '-1', '+')
  local rows = {}
  for at, entry in ipairs(found) do
    rows[at] = {string.match(entry[1], '^(%d+)'), entry[2][2], entry[2][4], false}
  end
  for first = 1, with_data and #rows or 0, 1000 do
    local seqs, last = {}, math.min(first + 999, #rows)
    for at = first, last do seqs[#seqs + 1] = rows[at][1] end
    for at, data in ipairs(call('HMGET', P .. 'data:' .. run, unpack(seqs))) do rows[first + at - 1][4] = data end
  end
  return rows
end

local function event(run, seq)
  local found = call('XRANGE', P .. 'log:' .. run, int(seq) .. '-0', int(seq) .. '-0')[1]
  return found and found[2]
end
