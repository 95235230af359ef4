-- Operations on whole runs and on the store.

-- name: open
-- The store's id, key and format, created if absent and permitted.
local meta = call('HGETALL', KEYS[1])
if #meta == 0 and args.create then
  for _, each in ipairs(args.meta) do
    call('HSET', KEYS[1], each[1], sealed(each[1], packed(1, blob(each[2]))))
  end
  call('HSET', KEYS[1], 'id', args.id)
  meta = call('HGETALL', KEYS[1])
end
return meta

-- name: set_references
local h = head_of(args.run)
if not h or h.seq ~= args.at or call('HLEN', P .. 'mail:' .. h.run) ~= args.delivered then return 0 end
unuse_all(P .. 'uses:' .. h.run)
for _, place in ipairs(args.hashes) do use(P .. 'uses:' .. h.run, blob(place)) end
return 1

-- name: sweep
local dead = call('SPOP', P .. 'unused', args.limit)
local swept = 0
for _, hash in ipairs(dead) do
  swept = swept + call('HDEL', P .. 'pieces', hash)
  call('SREM', P .. 'erased', hash)
end
return swept

-- name: forget_snapshots
if not head_of(args.run) then return 0 end
call('DEL', P .. 'shots:' .. args.run)
unuse_all(P .. 'shot_uses:' .. args.run)
return 1

-- name: reindex
local h = head_of(args.run)
if not h or h.seq ~= args.at then return 0 end
if args.delivered and call('HLEN', P .. 'mail:' .. h.run) ~= args.delivered then return 0 end
count_mail(h, int(call('HLEN', P .. 'mail:' .. h.run)))
put_index(h, args.index)
settle(h)
if args.slots then
  call('DEL', P .. 'slots:' .. h.run)
  put_slots(h.run, args.slots)
end
notify({h.run})
return 1

-- name: quarantine
local h = head_of(args.run)
if not h then return 0 end
put_or_drop(P .. 'run:' .. h.run, 'quarantined', args.reason)
settle(h)
if not args.reason then notify({h.run}) end
return 1

-- name: restore
local run = args.run
if not head_of(run) then return 0 end
if args.rows[1] then
  -- The log is rebuilt, because a stream accepts no entry at or before its last id.
  local kept, at = {}, {}
  for _, entry in ipairs(call('XRANGE', P .. 'log:' .. run, '-', '+')) do
    local seq = tonumber(string.match(entry[1], '^%d+'))
    kept[#kept + 1] = seq
    at[seq] = {entry[2][2], entry[2][4]}
  end
  for _, row in ipairs(args.rows) do
    if not at[row[1]] then kept[#kept + 1] = row[1] end
    at[row[1]] = {blob(row[2]), blob(row[3])}
    if row[4] then call('HSET', P .. 'data:' .. run, int(row[1]), blob(row[4])) end
  end
  table.sort(kept)
  call('DEL', P .. 'log:' .. run)
  for _, seq in ipairs(kept) do
    call('XADD', P .. 'log:' .. run, int(seq) .. '-0', 'b', at[seq][1], 'h', at[seq][2])
  end
end
for _, piece in ipairs(args.pieces) do
  local hash, codec, body = blob(piece[1]), piece[2], blob(piece[3])
  call('HSET', P .. 'pieces', hash, codec .. '\n' .. body)
  call('SREM', P .. 'erased', hash)
end
for _, m in ipairs(args.messages) do
  local number = int(m.number)
  put_message(run, number, {m.id, m.name, blob(m.body), m.by, m.at_us, m.taken, m.root, blob(m.pieces)})
  call('HSET', P .. 'mail_ids:' .. run, m.id, number)
end
return 1

-- name: repair
local run, old = args.run, any_head(args.run)
if old and args.least <= old.seq then
  return {old.seq == args.seq and old.hash == blob(args.hash) and 'there' or 'behind', int(old.seq)}
end
local h = {
  run = run, number = old and old.number or int(call('INCR', P .. 'created')), seq = args.seq, hash = blob(args.hash),
  epoch = args.epoch, base = args.base, parent = args.parent, holder = args.holder, till = args.till,
  kept = old and old.kept,
}
-- The log is rebuilt from the kept rows, because a stream accepts no entry at or before its last id.
local kept = call('XRANGE', P .. 'log:' .. run, '-', int(args.keep) .. '-0')
for _, row in ipairs(events(run, args.keep, nil, true)) do
  call('RPUSH', P .. 'aside:' .. run, sealed(run .. ':', packed(4, row[1], row[2], row[3], row[4])))
  call('HDEL', P .. 'data:' .. run, row[1])
end
call('DEL', P .. 'log:' .. run)
for _, entry in ipairs(kept) do call('XADD', P .. 'log:' .. run, entry[1], 'b', entry[2][2], 'h', entry[2][4]) end
put_rows(run, args.rows)
put_head(h)
call('HDEL', P .. 'run:' .. run, 'removed')
forget_marks(h)
call('ZADD', P .. 'runs', h.number, member(h))
call('HSET', P .. 'names', h.number, run)
call('ZADD', P .. 'unmarked', h.number, member(h))
settle(h)
return {'done'}

-- name: remove
local h = head_of(args.run)
if not h then return {'unknown'} end
local run, name = h.run, member(h)
if args.at and h.seq ~= args.at then return {'changed'} end
if args.delivered and call('HLEN', P .. 'mail:' .. run) ~= args.delivered then return {'changed'} end
local fork = call('SRANDMEMBER', P .. 'forks:' .. run)
if fork then return {'fork', fork} end
local index = index_of(run)
move('line', index.line, nil, name)
move('stand', index.stand, nil, name)
for _, tag in ipairs(call('SMEMBERS', P .. 'tags:' .. run)) do call('ZREM', P .. 'tag:' .. tag, name) end
for _, position in ipairs(call('SMEMBERS', P .. 'telling:' .. run)) do call('XDEL', P .. 'feed', position .. '-0') end
forget_marks(h)
for _, kind in ipairs({'runs', 'held', 'unmarked'}) do call('ZREM', P .. kind, name) end
call('HDEL', P .. 'names', h.number)
if h.parent then call('SREM', P .. 'forks:' .. h.parent, run) end
unuse_all(P .. 'uses:' .. run)
unuse_all(P .. 'shot_uses:' .. run)
leave_chain(run)
-- Its claims stay: removing a run does not return its consumed rights.
for _, kind in ipairs(args.kinds) do call('DEL', P .. kind .. ':' .. run) end
h.holder, h.till, h.parent, h.removed = nil, nil, nil, '1'
put_head(h)
call('HSET', P .. 'run:' .. run, 'removed', '1')
return {'done'}
