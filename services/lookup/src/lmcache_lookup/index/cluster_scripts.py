"""How a cluster takes a batch of events: claimed beside its lease, written bucket by bucket,
settled beside its lease (ADR 10).

Times are absolute, in milliseconds; the clocks of the cluster's servers may differ by `grace_ms`.
"""

from __future__ import annotations

from typing import Final

from lmcache_lookup.index.redis_node import Script
from lmcache_lookup.index.redis_scripts import MERGE, NOW

# KEYS leases, tenants. ARGV field, incarnation, first_sequence, number of events, claim, hold_ms,
# grace_ms, tenant... Returns {next_sequence, resync, number, claim_ends_ms}. The number is 0 where
# there is nothing to write, -1 where another claim holds.
CLAIM: Final = Script(
    NOW
    + """
local field, incarnation, first, claim = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[5]
local raw = redis.call('HGET', KEYS[1], field)
if not raw then return {0, 1, 0, 0} end
local lease = cjson.decode(raw)
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
# event three arguments of `merge`.
TAKE: Final = Script(
    NOW
    + MERGE
    + """
if now_ms > tonumber(ARGV[1]) then return redis.error_reply('LATE the claim has ended') end
for i = 5, #ARGV, 3 do merge(KEYS[1], ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])) end
return 1
"""  # noqa: E501
)

# KEYS leases. ARGV field, incarnation, claim, the number to wait for next; '' only gives the claim
# back. Returns {next_sequence, resync, ok}: not ok where the claim is no more.
SETTLE: Final = Script(
    NOW
    + """
local raw = redis.call('HGET', KEYS[1], ARGV[1])
if not raw then return {0, 1, 1} end
local lease = cjson.decode(raw)
if lease[4] <= now_ms or lease[2] ~= ARGV[2] or lease[6] == 1 then return {0, 1, 1} end
if lease[7] ~= ARGV[3] then return {lease[5], 0, 0} end
if ARGV[4] ~= '' then lease[5] = math.max(lease[5], tonumber(ARGV[4])) end
lease[7], lease[8] = '', 0
save(ARGV[1], lease)
return {lease[5], 0, 1}
"""
)

# KEYS mark. Returns it in milliseconds; a bucket without one gets one.
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
