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

-- id, name, body, by, at_us, taken
local function message(run, number)
  local found = call('HGET', P .. 'mail:' .. run, number)
  return found and unsealed(found)
end

local function put_message(run, number, m)
  local text = packed(6, m[1], m[2], m[3], m[4], m[5], m[6])
  call('HSET', P .. 'mail:' .. run, number, sealed(run .. ':' .. number .. ':', text))
  if m[6] then call('ZREM', P .. 'untaken:' .. run, number) else call('ZADD', P .. 'untaken:' .. run, number, number) end
end

local function count_mail(h, delivered)
  call('HSET', P .. 'run:' .. h.run, 'delivered', delivered, 'counted', check(packed(2, h.number, delivered)))
end

-- Delivers a message: {nil} for an unknown run, else {fresh, number, message}.
local function deliver(sent, notified)
  local h = head_of(sent.run)
  if not h then return {} end
  local run = sent.run
  local known = call('HGET', P .. 'mail_ids:' .. run, sent.id)
  if known then return {0, known, call('HGET', P .. 'mail:' .. run, known)} end
  local number = int(call('HLEN', P .. 'mail:' .. run) + 1)
  put_message(run, number, {sent.id, sent.name, blob(sent.body), sent.by, sent.at_us})
  call('HSET', P .. 'mail_ids:' .. run, sent.id, number)
  store_pieces(sent.pieces, P .. 'uses:' .. run)
  count_mail(h, number)
  local index = index_of(run)
  if index.agent and not ENDED[index.status] and not (index.wake and tonumber(index.wake) <= tonumber(sent.at_us)) then
    call('HSET', P .. 'run:' .. run, 'wake', sent.at_us)
    settle(h)
  end
  notified[#notified + 1] = run
  return {1, number, call('HGET', P .. 'mail:' .. run, number)}
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
      local at_us = found and tonumber(found[5])
      if at_us and (not wake or at_us < tonumber(wake)) then wake = found[5] end
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
