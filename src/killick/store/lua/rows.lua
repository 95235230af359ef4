-- Shared by all scripts: the keys of a store, packed rows and their checksums, heads, and a run's set memberships.
--
-- KEYS[1] is the store's `meta`; all keys share its prefix. ARGV: the store's id, the time ('' for the server's clock),
-- the arguments in MessagePack, and the binary values that these name by index. The keys of a run:
--
--   run:ID      head, index and quarantine              log:ID   events (a stream: seq-0, body and hash)
--   data:ID     the values of events, by seq            aside:ID events that repairs displaced
--   mail:ID     messages by number                      mail_ids:ID, untaken:ID  by id, and the unconsumed ones
--   slots:ID    conditions of deliveries, by name       chain:ID  the messages to its renewals: id -> their logs, newest first
--   shots:ID    snapshots                               uses:ID, shot_uses:ID    the chunks that it references
--   claimed:ID, tags:ID, marks:ID, telling:ID, forks:ID its entries in claims, tag sets, search terms, outbox, forks
--
-- The keys of all runs: runs, names (by number), created, pieces, refs, unused, erased, claims, owned (claims in order), feed, outbox_end (the last
-- outbox position), held, lines and line:… (by wake time), stands and stand:… (by status and agent), tag:…, mark:…,
-- unmarked, rate:… (token buckets). A script checks everything before it writes anything, because Redis rolls nothing back.

local P = string.sub(KEYS[1], 1, -5)
local args = ARGV[3] and ARGV[3] ~= '' and cmsgpack.unpack(ARGV[3]) or {}
local call = redis.call

if ARGV[1] ~= '' and call('HGET', KEYS[1], 'id') ~= ARGV[1] then
  return redis.error_reply('KILLICKGONE another store is here, or none')
end

local ENDED = {completed = true, failed = true, cancelled = true}
local OWN = 'killick.'

-- Numbers are doubles here, and would be written with an exponent.
local function int(number) return string.format('%.0f', number) end

local function now_us()
  if ARGV[2] ~= '' then return tonumber(ARGV[2]) end
  local time = call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

local function blob(place) return place and ARGV[place + 3] or nil end

-- Length-prefixed bytes, with a sign for nil.
local function packed(count, ...)
  local parts = {}
  for at = 1, count do
    local part = select(at, ...)
    parts[at] = part and (#part .. ':' .. part) or '-'
  end
  return table.concat(parts)
end

local function unpacked(text)
  local parts, at, count = {}, 1, 0
  while at <= #text do
    count = count + 1
    if string.sub(text, at, at) == '-' then
      at = at + 1
    else
      local colon = string.find(text, ':', at, true)
      local last = colon + tonumber(string.sub(text, at, colon - 1))
      parts[count] = string.sub(text, colon + 1, last)
      at = last + 1
    end
  end
  return parts
end

local function check(text) return string.sub(redis.sha1hex(text), 1, 8) end

-- A checksum for rows outside the chain. It covers the row's key.
local function sealed(place, text) return check(place .. text) .. text end

-- A row's contents; nil for a damaged row: no script may fail midway.
local function unsealed(text)
  local fine, parts = pcall(unpacked, string.sub(text, 9))
  return fine and parts or {}
end

local function padded(number, width) return string.rep('0', width - #number) .. number end

-- A run's member name in sorted sets: for equal scores, the older run sorts first.
local function member(head) return padded(head.number, 16) .. ':' .. head.run end
local function run_of(name) return string.sub(name, 18) end

local function head_check(h)
  local seq, epoch, base = int(h.seq), int(h.epoch), int(h.base)
  return check(packed(10, h.number, h.run, seq, h.hash, epoch, base, h.parent, h.holder, h.till, h.removed))
end

-- The head under an id, removed or not.
local function any_head(run)
  local found = call('HMGET', P .. 'run:' .. run,
    'number', 'seq', 'hash', 'epoch', 'base', 'parent', 'holder', 'until', 'removed')
  if not found[1] then return nil end
  return {
    run = run, number = found[1], seq = tonumber(found[2]) or -1, hash = found[3] or '', epoch = tonumber(found[4]) or -1,
    base = tonumber(found[5]) or -1, parent = found[6] or nil, holder = found[7] or nil, till = found[8] or nil,
    removed = found[9] or nil, kept = {parent = found[6] or nil, holder = found[7] or nil, till = found[8] or nil},
  }
end

local function head_of(run)
  local h = any_head(run)
  if h and not h.removed then return h end
end

local function shown(h)
  return {h.number, h.run, int(h.seq), h.hash, int(h.epoch), int(h.base), h.parent or false, h.holder or false,
    h.till or false}
end

local function put_or_drop(key, field, value)
  if value then call('HSET', key, field, value) else call('HDEL', key, field) end
end

local function put_head(h)
  local key = P .. 'run:' .. h.run
  call('HSET', key, 'number', h.number, 'seq', int(h.seq), 'hash', h.hash, 'epoch', int(h.epoch), 'base', int(h.base),
    'check', head_check(h))
  local kept = h.kept or {}
  if h.parent ~= kept.parent then put_or_drop(key, 'parent', h.parent) end
  if h.holder ~= kept.holder then put_or_drop(key, 'holder', h.holder) end
  if h.till ~= kept.till then put_or_drop(key, 'until', h.till) end
end

-- The end of a lease; a free run's ended at the start of time.
local function lease_end(h)
  if not h.holder then return 0 end
  return h.till and tonumber(h.till) or math.huge
end

-- An unheld run's wake set: by priority, lane and agent, at a time. Nil: none.
local function line_of(h, index)
  if h.holder or not index.agent or not index.wake or index.quarantined or ENDED[index.status] then return nil end
  return index.priority .. ':' .. index.lane .. ':' .. index.agent
end

local function index_of(run)
  local found = call('HMGET', P .. 'run:' .. run, 'agent', 'status', 'priority', 'wake', 'quarantined', 'line', 'stand',
    'changed', 'lane')
  return {
    agent = found[1] or nil, status = found[2] or nil, priority = found[3] or nil, wake = found[4] or nil,
    quarantined = found[5] or nil, line = found[6] or nil, stand = found[7] or nil, changed = found[8] or nil,
    lane = found[9] or '0',
  }
end

-- Moves a run between sets of a kind, or changes its score.
local function move(kind, from, to, name, score)
  if from and from ~= to then
    call('ZREM', P .. kind .. ':' .. from, name)
    if call('EXISTS', P .. kind .. ':' .. from) == 0 then call('SREM', P .. kind .. 's', from) end
  end
  if to then
    call('ZADD', P .. kind .. ':' .. to, score, name)
    if from ~= to then call('SADD', P .. kind .. 's', to) end
  end
end

-- Writes a run's set memberships from its head and its index.
local function settle(h)
  local index, key, name = index_of(h.run), P .. 'run:' .. h.run, member(h)
  local line = line_of(h, index)
  move('line', index.line, line, name, index.wake)
  if line ~= index.line then put_or_drop(key, 'line', line) end
  local stand = index.agent and (index.status .. ':' .. index.agent)
  move('stand', index.stand, stand, name, h.number)
  if stand ~= index.stand then put_or_drop(key, 'stand', stand) end
  if h.holder then call('ZADD', P .. 'held', h.till or '+inf', name) else call('ZREM', P .. 'held', name) end
  return index
end

local function row_of(run)
  return call('HMGET', P .. 'run:' .. run, 'number', 'agent', 'status', 'priority', 'wake', 'started', 'changed', 'tags',
    'delivered', 'counted')
end

local function notify(runs)
  local seen = {}
  for _, run in ipairs(runs) do
    if not seen[run] then
      seen[run] = true
      -- Every database of the server receives it, so it names the store.
      call('PUBLISH', P .. 'bell:' .. ARGV[1], run)
    end
  end
end
