"""What has to be atomic in Redis, as Lua. Each script touches keys of one slot only.

A lease is a JSON array `[number, incarnation, kind, expires_ms, next_sequence, resync]`. Incarnations are decimal text of 20 digits, since
Lua's numbers are doubles; `expires_ms` is in Redis' own clock. The version is the time of the last change: unlike a counter, it does not
come back after a flush.
"""

from __future__ import annotations

from typing import Final

_NOW: Final = """
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function touch(key) redis.call('SET', key, time[1] .. '.' .. time[2]) end
local function save(field, lease) redis.call('HSET', KEYS[1], field, cjson.encode(lease)) end
"""

# KEYS leases, version, numbers. ARGV field, incarnation, kind, ttl_ms, max_instances.
# Returns {next_sequence, resync, ok}.
RENEW: Final = (
    _NOW
    + """
local field, incarnation, kind, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local raw = redis.call('HGET', KEYS[1], field)
local number
if raw then
  local lease = cjson.decode(raw)
  local alive = lease[4] > now_ms
  if alive and incarnation < lease[2] then return {0, 1, 1} end
  if alive and incarnation == lease[2] then
    lease[4] = now_ms + ttl_ms
    save(field, lease)
    return {lease[5], lease[6], 1}
  end
  number = lease[1]
elseif redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then
  local leases = redis.call('HGETALL', KEYS[1])
  for i = 1, #leases, 2 do
    if cjson.decode(leases[i + 1])[4] <= now_ms then redis.call('HDEL', KEYS[1], leases[i]) end
  end
  if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then return {0, 0, 0} end
end
number = number or redis.call('INCR', KEYS[3])
save(field, {number, incarnation, kind, now_ms + ttl_ms, 0, 0})
touch(KEYS[2])
return {0, 0, 1}
"""
)

# KEYS leases, version. ARGV field, incarnation or ''. Returns whether a live lease ended.
END: Final = (
    _NOW
    + """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return 0 end
local lease = cjson.decode(raw)
if ARGV[2] ~= '' and ARGV[2] ~= lease[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
touch(KEYS[2])
return lease[4] > now_ms and 1 or 0
"""
)

# KEYS leases. ARGV field, incarnation, first_sequence. Returns {next_sequence, resync, instance number}.
CHECK: Final = (
    _NOW
    + """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return {0, 1, 0} end
local lease = cjson.decode(raw)
if lease[4] <= now_ms or lease[2] ~= ARGV[2] or lease[6] == 1 then return {0, 1, 0} end
return {lease[5], tonumber(ARGV[3]) > lease[5] and 1 or 0, lease[1]}
"""
)

# KEYS leases, tenants. ARGV field, incarnation, next_sequence, tenant... Returns {next_sequence, resync}.
COMMIT: Final = (
    _NOW
    + """
for i = 4, #ARGV do redis.call('SADD', KEYS[2], ARGV[i]) end
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return {0, 1} end
local lease = cjson.decode(raw)
if lease[2] ~= ARGV[2] then return {0, 1} end
lease[5] = math.max(lease[5], tonumber(ARGV[3]))
save(ARGV[1], lease)
return {lease[5], lease[6]}
"""
)

# KEYS leases. ARGV owner. Marks its leases, so that their instances announce everything again.
RESYNC: Final = (
    _NOW
    + """
local leases = redis.call('HGETALL', KEYS[1])
local prefix = ARGV[1] .. '/'
for i = 1, #leases, 2 do
  if string.sub(leases[i], 1, #prefix) == prefix then
    local lease = cjson.decode(leases[i + 1])
    lease[6] = 1
    save(leases[i], lease)
  end
end
"""
)

# KEYS leases, version. Returns {now_ms, version, leases...}: one consistent picture.
TABLE: Final = (
    _NOW
    + """
return {now_ms, redis.call('GET', KEYS[2]) or '', redis.call('HGETALL', KEYS[1])}
"""
)

# KEYS bucket. ARGV ttl_s, max_holders, then (chunk id, holder, stores) for each event, a holder being packed as in `packing`.
# Entries of the same instance in another incarnation go too: they are dead.
UPDATE: Final = """
local max_holders = tonumber(ARGV[2])
for i = 3, #ARGV, 3 do
  local id, holder, stores = ARGV[i], ARGV[i + 1], ARGV[i + 2] == '1'
  local number, incarnation, tier = string.sub(holder, 1, 4), string.sub(holder, 5, 12), string.sub(holder, 22)
  local old = redis.call('HGET', KEYS[1], id) or ''
  local kept, at = {}, 1
  while at + 20 <= #old do
    local stop = at + 20 + string.byte(old, at + 20)
    local mine = string.sub(old, at, at + 3) == number
    if not mine or (string.sub(old, at + 4, at + 11) == incarnation and string.sub(old, at + 21, stop) ~= tier) then
      kept[#kept + 1] = string.sub(old, at, stop)
    end
    at = stop + 1
  end
  if stores then
    if #kept >= max_holders then table.remove(kept, 1) end
    kept[#kept + 1] = holder
  end
  if #kept > 0 then redis.call('HSET', KEYS[1], id, table.concat(kept)) else redis.call('HDEL', KEYS[1], id) end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
"""

# KEYS bucket. ARGV (chunk id, identity) for each dead holder, an identity being its first 12 bytes. Returns how many went.
PRUNE: Final = """
local gone = 0
for i = 1, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], ARGV[i]) or ''
  local kept, at = {}, 1
  while at + 20 <= #old do
    local stop = at + 20 + string.byte(old, at + 20)
    if string.sub(old, at, at + 11) == ARGV[i + 1] then gone = gone + 1 else kept[#kept + 1] = string.sub(old, at, stop) end
    at = stop + 1
  end
  if #kept > 0 then redis.call('HSET', KEYS[1], ARGV[i], table.concat(kept)) else redis.call('HDEL', KEYS[1], ARGV[i]) end
end
return gone
"""

ALL: Final = (RENEW, END, CHECK, COMMIT, RESYNC, TABLE, UPDATE, PRUNE)
