"""Atomic operations in Redis, in Lua.

A lease is a JSON array `[number, incarnation, kind, expires_ms, next_sequence, resync]`, in a
cluster with two more: the claim of the batch being taken, "" for none, and when it ends.
Incarnations are decimal text of 20 digits, since Lua's numbers are doubles; times are on Redis' own
clock. The version is the time of the last change: unlike a counter, it does not repeat after a
flush. Instance numbers begin at the time in seconds for the same reason: a number that was lost
with its lease is not assigned again. A field that holds no lease counts as none, and is replaced.

`APPLY` touches many buckets in one call, which only a single server allows; a cluster takes a batch
by `CLAIM`, a `TAKE` for each bucket, and `SETTLE`.
"""

from __future__ import annotations

from typing import Final

from lmcache_servicekit.redis_client import Script

NOW: Final = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function touch(key) redis.call('SET', key, time[1] .. '.' .. time[2]) end
local LEASE = {'number', 'string', 'string', 'number', 'number', 'number'}
local function lease_of(raw)
  local is_json, lease = pcall(cjson.decode, raw)
  if not is_json or type(lease) ~= 'table' then return nil end
  for i = 1, #LEASE do
    if type(lease[i]) ~= LEASE[i] then return nil end
  end
  return lease
end
local function save(field, lease) redis.call('HSET', KEYS[1], field, cjson.encode(lease)) end
"""

# Besides its chunks a bucket has the field `#n`, the number of holders above one for each chunk, if
# there are any, and `#at`, where the hand of `TRIM` is. num_holders(bucket) counts all holders;
# changed(bucket, old, new) is called when a chunk has lost or gained some.
COUNT: Final = """
local function num_holders(bucket)
  local fields = redis.call('HMGET', bucket, '#n', '#at')
  local num_chunks = redis.call('HLEN', bucket) - (fields[1] and 1 or 0) - (fields[2] and 1 or 0)
  return num_chunks + (tonumber(fields[1] or 0) or 0)
end
local function changed(bucket, old, new)
  local change = math.max(0, new - 1) - math.max(0, old - 1)
  local n = change ~= 0 and redis.pcall('HINCRBY', bucket, '#n', change) or 1
  if type(n) ~= 'number' or n <= 0 then redis.call('HDEL', bucket, '#n') end
  if new == 0 and redis.call('HLEN', bucket) == 1 then redis.call('HDEL', bucket, '#at') end
end
local function drop(bucket, id)
  local value, n, at = redis.pcall('HGET', bucket, id), 0, 1
  if type(value) ~= 'string' then return false end
  while at + 20 <= #value do n, at = n + 1, at + 21 + string.byte(value, at + 20) end
  redis.call('HDEL', bucket, id)
  changed(bucket, n, 0)
  return true
end
"""

# merge(bucket, chunk id, holder without its instance number, 1 for a store or 0, packed instance
# number, max_holders) returns how many holders the bucket has after a store that added one, or 0.
# Entries of the same number in an earlier incarnation are dead and dropped in passing. If one is of
# a later incarnation, the event itself is dead. A foreign value in the bucket's place is deleted.
MERGE: Final = (
    COUNT
    + """
local function is_later(life, other)
  local low, high = struct.unpack('<I4I4', life)
  local other_low, other_high = struct.unpack('<I4I4', other)
  return high > other_high or (high == other_high and low > other_low)
end
local function merge(bucket, id, rest, is_store, number, max_holders)
  local life, tier = string.sub(rest, 1, 8), string.sub(rest, 18)
  local old = redis.pcall('HGET', bucket, id) or ''
  if type(old) == 'table' then
    redis.call('DEL', bucket)
    old = ''
  end
  local kept, at, num_old = {}, 1, 0
  while at + 20 <= #old do
    local stop = at + 20 + string.byte(old, at + 20)
    num_old = num_old + 1
    local keeps = string.sub(old, at, at + 3) ~= number
    if not keeps then
      local its_life = string.sub(old, at + 4, at + 11)
      if its_life == life then keeps = string.sub(old, at + 21, stop) ~= tier elseif is_later(its_life, life) then return 0 end
    end
    if keeps then kept[#kept + 1] = string.sub(old, at, stop) end
    at = stop + 1
  end
  if is_store == '1' then
    if #kept >= max_holders then table.remove(kept, 1) end
    kept[#kept + 1] = number .. rest
  end
  if #kept > 0 then redis.call('HSET', bucket, id, table.concat(kept)) else redis.call('HDEL', bucket, id) end
  if #kept == num_old then return 0 end
  changed(bucket, num_old, #kept)
  return #kept > num_old and num_holders(bucket) or 0
end
"""  # noqa: E501
)

# KEYS leases, version, numbers, nodes, marks. ARGV field, incarnation, kind, ttl_ms, max_instances,
# epoch, run ids of the cluster's masters in order and marks of its buckets, each '' without a
# cluster or if not all of them answer, max_instances of an owner. Returns {next_sequence, resync,
# ok}, ok being 0 if all places are taken, -1 if all of the owner's are. A master with a run id that
# is not among the known ones, or with a newer mark in a bucket, may have lost acknowledged data:
# all instances are asked to announce again. An older mark was read earlier by another replica.
RENEW: Final = Script(
    NOW
    + """
local field, incarnation, kind, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local lost = false
if ARGV[7] ~= '' then
  local known, epoch = redis.call('GET', KEYS[4]), tonumber(ARGV[6])
  known = known and cjson.decode(known) or {0, ''}
  if epoch >= known[1] and ARGV[7] ~= known[2] then
    for id in string.gmatch(ARGV[7], '[^,]+') do lost = lost or not string.find(known[2], id, 1, true) end
    redis.call('SET', KEYS[4], cjson.encode({epoch, ARGV[7]}))
  end
end
if ARGV[8] ~= '' then
  local marks, place, is_newer = {}, 0, false
  for mark in string.gmatch(redis.call('GET', KEYS[5]) or '', '%d+') do marks[#marks + 1] = tonumber(mark) end
  for mark in string.gmatch(ARGV[8], '%d+') do
    place = place + 1
    if tonumber(mark) > (marks[place] or 0) then marks[place], is_newer = tonumber(mark), true end
  end
  if is_newer then redis.call('SET', KEYS[5], table.concat(marks, ',')) end
  lost = lost or is_newer
end
local leases = lost and redis.call('HGETALL', KEYS[1]) or {}
for i = 1, #leases, 2 do
  local lease = lease_of(leases[i + 1])
  if lease then
    lease[6] = 1
    save(leases[i], lease)
  end
end
local lease = lease_of(redis.call('HGET', KEYS[1], field))
local number
if lease then
  local alive = lease[4] > now_ms
  if alive and incarnation < lease[2] then return {0, 1, 1} end
  if alive and incarnation == lease[2] then
    lease[4] = now_ms + ttl_ms
    local is_same_kind = lease[3] == kind
    lease[3] = kind
    -- A Redis without room refuses a script's first write that could take some, and none after a write that takes none.
    -- Leases must be renewed even then, or all that is known dies with them.
    redis.call('HDEL', KEYS[1], field)
    save(field, lease)
    if not is_same_kind then touch(KEYS[2]) end
    return {lease[5], lease[6], 1}
  end
  if incarnation > lease[2] then number = lease[1] end
else
  local prefix = string.match(field, '^[^/]*/')
  local function places()
    local own = 0
    for _, other in ipairs(redis.call('HKEYS', KEYS[1])) do
      if string.sub(other, 1, #prefix) == prefix then own = own + 1 end
    end
    local counted = prefix == '*/' and own or redis.call('HLEN', KEYS[1])
    return counted < tonumber(ARGV[5]), own < tonumber(ARGV[9])
  end
  local fits, own_fits = places()
  if not (fits and own_fits) then
    local leases = redis.call('HGETALL', KEYS[1])
    for i = 1, #leases, 2 do
      local other = lease_of(leases[i + 1])
      if not other or other[4] <= now_ms then redis.call('HDEL', KEYS[1], leases[i]) end
    end
    fits, own_fits = places()
  end
  if not own_fits then return {0, 0, -1} end
  if not fits then return {0, 0, 0} end
end
if not number then
  number = math.max(tonumber(redis.call('GET', KEYS[3]) or 0) + 1, tonumber(time[1]))
  redis.call('SET', KEYS[3], string.format('%d', number))
end
save(field, {number, incarnation, kind, now_ms + ttl_ms, 0, 0})
touch(KEYS[2])
return {0, 0, 1}
"""  # noqa: E501
)

# KEYS leases, version. ARGV field, incarnation or ''. Returns whether a live lease ended.
END: Final = Script(
    NOW
    + """
local lease = lease_of(redis.call('HGET', KEYS[1], ARGV[1]))
if not lease then return 0 end
if ARGV[2] ~= '' and ARGV[2] ~= lease[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
touch(KEYS[2])
return lease[4] > now_ms and 1 or 0
"""
)

# KEYS leases, tenants, bucket... ARGV field, incarnation, first_sequence, max_chunks of a bucket,
# max_holders, number of tenants, tenant..., and for each event the index of its bucket in KEYS and
# three arguments of `merge`. Returns {next_sequence, resync, indices of full buckets...}.
APPLY: Final = Script(
    NOW
    + MERGE
    + """
local field, incarnation, first, max_chunks, max_holders = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local lease = lease_of(redis.call('HGET', KEYS[1], field))
if not lease then return {0, 1} end
if lease[4] <= now_ms or lease[2] ~= incarnation or lease[6] == 1 then return {0, 1} end
if first > lease[5] then return {lease[5], 1} end
local number = struct.pack('<I4', lease[1])
local begin = 7 + tonumber(ARGV[6])
local answer, is_full = {0, 0}, {}
for i = begin + 4 * (lease[5] - first), #ARGV, 4 do
  local place = tonumber(ARGV[i])
  local n = merge(KEYS[place], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], number, max_holders)
  if n > max_chunks and not is_full[place] then answer[#answer + 1], is_full[place] = place, true end
end
for i = 7, begin - 1 do redis.call('SADD', KEYS[2], ARGV[i]) end
lease[5] = math.max(lease[5], first + (#ARGV - begin + 1) / 4)
save(field, lease)
answer[1] = lease[5]
return answer
"""  # noqa: E501
)

# KEYS leases. ARGV owner. Marks its leases, shared ones and those of storage servers, so that these
# instances announce everything again.
RESYNC: Final = Script(
    NOW
    + """
local leases = redis.call('HGETALL', KEYS[1])
local prefix = ARGV[1] .. '/'
for i = 1, #leases, 2 do
  local lease = lease_of(leases[i + 1])
  local is_own = string.sub(leases[i], 1, #prefix) == prefix
  if lease and (is_own or string.sub(leases[i], 1, 2) == '*/' or lease[3] == 'storage') then
    lease[6] = 1
    save(leases[i], lease)
  end
end
"""
)

# KEYS leases, version. Returns {now_ms, version, leases}: a consistent snapshot.
TABLE: Final = Script(
    NOW
    + """
return {now_ms, redis.call('GET', KEYS[2]) or '', redis.call('HGETALL', KEYS[1])}
"""
)

# KEYS bucket. ARGV (chunk id, identity) for each dead holder, an identity being its first 12 bytes.
# Returns how many were removed.
PRUNE: Final = Script(
    COUNT
    + """
local gone = 0
for i = 1, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  local kept, at, num_old = {}, 1, 0
  while at + 20 <= #old do
    local stop = at + 20 + string.byte(old, at + 20)
    num_old = num_old + 1
    if string.sub(old, at, at + 11) == ARGV[i + 1] then gone = gone + 1 else kept[#kept + 1] = string.sub(old, at, stop) end
    at = stop + 1
  end
  -- Deleted first for the same reason as a lease that is renewed (see `RENEW`): a Redis without room must be swept, too.
  redis.call('HDEL', KEYS[1], ARGV[i])
  if #kept > 0 then redis.call('HSET', KEYS[1], ARGV[i], table.concat(kept)) end
  changed(KEYS[1], num_old, #kept)
end
return gone
"""  # noqa: E501
)

# KEYS bucket. ARGV chunk id... Returns how many were there.
EVICT: Final = Script(
    COUNT
    + """
local num_known = 0
for i = 1, #ARGV do
  if drop(KEYS[1], ARGV[i]) then num_known = num_known + 1 end
end
return num_known
"""
)

# KEYS bucket. ARGV max_chunks, where to continue the next time, and chunk ids in the order in which
# to drop them until no more holders than that are left. Returns {1 if there are still more, or 0,
# how many chunks were dropped}.
TRIM: Final = Script(
    COUNT
    + """
local max, num_dropped = tonumber(ARGV[1]), 0
for i = 3, #ARGV do
  if num_holders(KEYS[1]) <= max then break end
  if drop(KEYS[1], ARGV[i]) then num_dropped = num_dropped + 1 end
end
if ARGV[2] == '0' then redis.call('HDEL', KEYS[1], '#at') else redis.call('HSET', KEYS[1], '#at', ARGV[2]) end
return {num_holders(KEYS[1]) > max and 1 or 0, num_dropped}
"""  # noqa: E501
)

# Scripts for a cluster. Times are absolute, in milliseconds; the clocks of its servers may differ
# by `grace_ms`.

# KEYS leases, tenants. ARGV field, incarnation, first_sequence, number of events, claim, hold_ms,
# grace_ms, tenant... Returns {next_sequence, resync, number, claim_ends_ms}. The number is 0 if
# there is nothing to write, -1 if another claim is active.
CLAIM: Final = Script(
    NOW
    + """
local field, incarnation, first, claim = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[5]
local lease = lease_of(redis.call('HGET', KEYS[1], field))
if not lease then return {0, 1, 0, 0} end
if lease[4] <= now_ms or lease[2] ~= incarnation or lease[6] == 1 then return {0, 1, 0, 0} end
if first > lease[5] then return {lease[5], 1, 0, 0} end
if first + tonumber(ARGV[4]) <= lease[5] then return {lease[5], 0, 0, 0} end
if (lease[7] or '') ~= '' and lease[7] ~= claim and now_ms <= lease[8] + tonumber(ARGV[7]) then return {lease[5], 0, -1, 0} end
lease[7], lease[8] = claim, now_ms + tonumber(ARGV[6])
save(field, lease)
for i = 8, #ARGV do redis.call('SADD', KEYS[2], ARGV[i]) end
return {lease[5], 0, lease[1], lease[8]}
"""  # noqa: E501
)

# KEYS bucket. ARGV claim_ends_ms, packed instance number, max_holders, max_chunks, and for each
# event three arguments of `merge`. Returns 1 if the bucket is full, or 0.
TAKE: Final = Script(
    NOW
    + MERGE
    + """
if now_ms > tonumber(ARGV[1]) then return redis.error_reply('LATE the claim has ended') end
local max_chunks, is_full = tonumber(ARGV[4]), 0
for i = 5, #ARGV, 3 do
  if merge(KEYS[1], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[2], tonumber(ARGV[3])) > max_chunks then is_full = 1 end
end
return is_full
"""  # noqa: E501
)

# KEYS leases. ARGV field, incarnation, claim, the next number to expect; '' only releases the
# claim. Returns {next_sequence, resync, ok}: not ok if the claim is gone.
SETTLE: Final = Script(
    NOW
    + """
local lease = lease_of(redis.call('HGET', KEYS[1], ARGV[1]))
if not lease then return {0, 1, 1} end
if lease[4] <= now_ms or lease[2] ~= ARGV[2] or lease[6] == 1 then return {0, 1, 1} end
if lease[7] ~= ARGV[3] then return {lease[5], 0, 0} end
if ARGV[4] ~= '' then lease[5] = math.max(lease[5], tonumber(ARGV[4])) end
lease[7], lease[8] = '', 0
save(ARGV[1], lease)
return {lease[5], 0, 1}
"""
)

# KEYS mark. Returns it in milliseconds; creates a missing one.
MARK: Final = Script(
    NOW
    + """
local mark = redis.call('GET', KEYS[1])
if not mark then
  mark = string.format('%d', now_ms)
  redis.call('SET', KEYS[1], mark)
end
return mark
"""
)
