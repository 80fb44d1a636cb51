"""Operations that must be atomic, or one round trip, in Redis: Lua. All keys have one hash tag, so
that they are on one node of a cluster.

`peers` maps `<owner>/<peer>` to text: incarnation (20 digits), draining (0 or 1), end of the lease
(15 digits, Redis' milliseconds), then JSON that the scripts do not read: `[distributed_url, kind,
zone, node, load, drain, figures]`, surplus fields ignored.

`pulls` scores each pull's id with its end. `owners` has `requester NUL life NUL begin` for each, so
any broker can renew and end what another granted. `counts` has the number of pulls of each life.
`orders` has a line for each copy that a peer should make: `end chunk taker address`.
"""

from __future__ import annotations

from typing import Final

from lmcache_servicekit.redis_client import Script

KEYS: Final = tuple(
    f"lmcache:{{broker}}:{name}" for name in ("peers", "pulls", "counts", "owners", "orders")
)

_COMMON: Final = """
local PEERS, PULLS, COUNTS, OWNERS, ORDERS = unpack(KEYS)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local function save(field, incarnation, draining, ends_ms, rest)
  redis.call('HSET', PEERS, field, incarnation .. draining .. string.format('%015d', ends_ms) .. rest)
end
local function live(field)
  local raw = redis.call('HGET', PEERS, field)
  if not raw then return nil end
  local record = {incarnation = string.sub(raw, 1, 20), draining = string.sub(raw, 21, 21),
    ends_ms = tonumber(string.sub(raw, 22, 36)), rest = string.sub(raw, 37)}
  return record.ends_ms > now_ms and record or nil
end
local function pull_of(id)
  local raw = redis.call('HGET', OWNERS, id)
  if not raw then return nil end
  local who, life, began_ms = string.match(raw, '^([^%z]*)%z([^%z]*)%z(%d+)$')
  return {who = who, life = life, began_ms = tonumber(began_ms)}
end
local function recount(life, by)
  local count = redis.call('HINCRBY', COUNTS, life, by)
  if count <= 0 then redis.call('HDEL', COUNTS, life) end
  return count
end
local function begin_pull(id, who, life, ends_ms)
  redis.call('ZADD', PULLS, ends_ms, id)
  redis.call('HSET', OWNERS, id, who .. '\\0' .. life .. '\\0' .. string.format('%d', now_ms))
  return recount(life, 1)
end
local function end_pull(id)
  local pull = pull_of(id)
  redis.call('ZREM', PULLS, id)
  redis.call('HDEL', OWNERS, id)
  if pull then recount(pull.life, -1) end
end
local function purge()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', PULLS, '-inf', now_ms, 'LIMIT', 0, 1000)) do end_pull(id) end
end
local function keep()
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 86400000) end
end
"""  # noqa: E501

# ARGV field, incarnation, draining, ttl_ms, rest. Returns 0 or 1 (draining), or -1: a newer one is
# live.
ANNOUNCE: Final = Script(
    _COMMON
    + """
local field, incarnation, draining = ARGV[1], ARGV[2], ARGV[3]
local ends_ms = now_ms + tonumber(ARGV[4])
local known = live(field)
if known and incarnation < known.incarnation then return -1 end
if known and incarnation == known.incarnation then
  if known.draining == '1' then draining = '1' end
  ends_ms = math.max(ends_ms, known.ends_ms)
  -- A Redis without room refuses a script's first write that could take some, and none after a write that takes none.
  redis.call('HDEL', PEERS, field)
end
save(field, incarnation, draining, ends_ms, ARGV[5])
keep()
return tonumber(draining)
"""  # noqa: E501
)

# ARGV field.
REMOVE: Final = Script(
    _COMMON
    + """
redis.call('HDEL', PEERS, ARGV[1])
"""
)

# ARGV field.
DRAIN: Final = Script(
    _COMMON
    + """
local known = live(ARGV[1])
if known then
  redis.call('HDEL', PEERS, ARGV[1])  -- as in ANNOUNCE
  save(ARGV[1], known.incarnation, '1', known.ends_ms, known.rest)
end
"""
)

# Returns {now_ms, then for each live peer field, record, pulls}; the others are removed in passing.
READ: Final = Script(
    _COMMON
    + """
purge()
local found = {now_ms}
local peers = redis.call('HGETALL', PEERS)
for i = 1, #peers, 2 do
  local field, raw = peers[i], peers[i + 1]
  if tonumber(string.sub(raw, 22, 36)) <= now_ms then
    redis.call('HDEL', PEERS, field)
  else
    local life = field .. '#' .. (string.gsub(string.sub(raw, 1, 20), '^0+(%d)', '%1'))
    found[#found + 1] = field
    found[#found + 1] = raw
    found[#found + 1] = tonumber(redis.call('HGET', COUNTS, life) or '0')
  end
end
return found
"""
)

# ARGV requester, max_pulls, ttl_ms, then for each pull its life and its id. Returns for each
# whether it is granted (0 or 1), and the life's pulls.
CLAIM: Final = Script(
    _COMMON
    + """
purge()
local found = {}
for i = 4, #ARGV, 2 do
  local life = ARGV[i]
  local count = tonumber(redis.call('HGET', COUNTS, life) or '0')
  local granted = count < tonumber(ARGV[2]) and 1 or 0
  if granted == 1 then count = begin_pull(ARGV[i + 1], ARGV[1], life, now_ms + tonumber(ARGV[3])) end
  found[#found + 1] = granted
  found[#found + 1] = count
end
keep()
return found
"""  # noqa: E501
)

# ARGV requester, ttl_ms, longest age in ms, then the ids. Returns for each the life, or an empty
# text.
RENEW_PULLS: Final = Script(
    _COMMON
    + """
purge()
local found = {}
for i = 4, #ARGV do
  local pull = pull_of(ARGV[i])
  local life = ''
  if pull and pull.who == ARGV[1] and now_ms - pull.began_ms <= tonumber(ARGV[3]) then
    redis.call('ZADD', PULLS, now_ms + tonumber(ARGV[2]), ARGV[i])
    life = pull.life
  end
  found[#found + 1] = life
end
return found
"""
)

# ARGV requester, then the ids. Returns for each whether there was such a pull (0 or 1).
END_PULLS: Final = Script(
    _COMMON
    + """
purge()
local found = {}
for i = 2, #ARGV do
  local pull = pull_of(ARGV[i])
  local is_owner = pull and pull.who == ARGV[1]
  if is_owner then end_pull(ARGV[i]) end
  found[#found + 1] = is_owner and 1 or 0
end
return found
"""
)

# ARGV ttl_ms, most peers, most bytes for each, then for each order the field of the peer that is to
# make the copy, and its line without the end. Orders are expendable: if there are too many, all are
# dropped.
ORDER_COPIES: Final = Script(
    _COMMON
    + """
for i = 4, #ARGV, 2 do
  local known = redis.call('HGET', ORDERS, ARGV[i]) or ''
  if #known < tonumber(ARGV[3]) then
    if known == '' and redis.call('HLEN', ORDERS) >= tonumber(ARGV[2]) then redis.call('DEL', ORDERS) end
    redis.call('HSET', ORDERS, ARGV[i], known .. string.format('%d', now_ms + tonumber(ARGV[1])) .. ' ' .. ARGV[i + 1] .. '\\n')
  end
end
redis.call('PEXPIRE', ORDERS, ARGV[1])
"""  # noqa: E501
)

# ARGV field. Returns {now_ms, lines}; each line is returned once.
TAKE_ORDERS: Final = Script(
    _COMMON
    + """
local lines = redis.call('HGET', ORDERS, ARGV[1]) or ''
redis.call('HDEL', ORDERS, ARGV[1])
return {now_ms, lines}
"""
)
