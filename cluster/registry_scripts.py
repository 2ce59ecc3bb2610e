"""What the registry keeps on its server, and the Lua scripts that read and write it, each in one atomic step.

Keys, all behind the prefix of the namespace:

- ``worker:ID`` and ``router:ID``: a record, as the incarnation in 20 digits and the record in MessagePack.
  Ends with its lease.
- ``workers`` and ``routers``: sets of the ids, and ``""`` as a mark: a set without it has been lost.
- ``epoch``: changes whenever something of this was lost.
- ``changes``: the channel on which an id is published when its record comes, changes or goes.

Any of it may be deleted, evicted or overwritten by others. Each renewal writes again all that a registration
wrote, so that the cluster is whole after one heartbeat.
"""

from __future__ import annotations

INCARNATION_DIGITS = 20  # zero-padded, so that strings compare like the numbers, which Lua cannot hold

_HAS_WRONG_TYPE = """
local function has_wrong_type(reply)
  return type(reply) == 'table' and reply.err and string.find(reply.err, 'WRONGTYPE', 1, true)
end
"""

# KEYS: record, ids, channel. ARGV: incarnation, value, lease in ms, id. 0: a newer incarnation holds the id.
PUT = f"""
{_HAS_WRONG_TYPE}
local current = redis.pcall('GET', KEYS[1])
if type(current) == 'table' then
  if not has_wrong_type(current) then return current end
  current = false
end
if current then
  local incarnation = string.sub(current, 1, {INCARNATION_DIGITS})
  if string.find(incarnation, '^' .. string.rep('%d', {INCARNATION_DIGITS})) and incarnation > ARGV[1] then
    return 0
  end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
local added = redis.pcall('SADD', KEYS[2], ARGV[4])
if has_wrong_type(added) then
  redis.call('DEL', KEYS[2])
  added = redis.call('SADD', KEYS[2], ARGV[4])
elseif type(added) == 'table' then
  return added
end
if added == 1 or current ~= ARGV[2] then redis.call('PUBLISH', KEYS[3], ARGV[4]) end
return 1
"""

# KEYS: record, ids, channel. ARGV: incarnation, id. Leaves alone what is not this incarnation's.
DELETE = f"""
local current = redis.pcall('GET', KEYS[1])
if type(current) ~= 'string' or string.sub(current, 1, {INCARNATION_DIGITS}) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.pcall('SREM', KEYS[2], ARGV[2])
redis.call('PUBLISH', KEYS[3], ARGV[2])
return 1
"""

# KEYS: ids of workers, ids of routers, epoch. ARGV: key prefix, a new epoch. Drops ids whose lease has ended.
# Returns the epoch, workers and routers (each as id, value, id, value, …), and keys that hold something else.
LIST = f"""
{_HAS_WRONG_TYPE}
local members, odd, is_lost = {{}}, {{}}, false
for kind = 1, 2 do
  local found = {{}}
  local ids = redis.pcall('SMEMBERS', KEYS[kind])
  if has_wrong_type(ids) then
    table.insert(odd, KEYS[kind])
    ids, is_lost = {{}}, true
  elseif ids.err then
    return ids
  elseif redis.call('SADD', KEYS[kind], '') == 1 then
    is_lost = true
  end
  for _, id in ipairs(ids) do
    local key = ARGV[1] .. (kind == 1 and 'worker:' or 'router:') .. id
    local value = id ~= '' and redis.pcall('GET', key)
    if type(value) == 'string' then
      table.insert(found, id)
      table.insert(found, value)
    elseif value then
      table.insert(odd, key)
    elseif id ~= '' then
      redis.call('SREM', KEYS[kind], id)
    end
  end
  table.insert(members, found)
end
local epoch = redis.pcall('GET', KEYS[3])
if is_lost or type(epoch) ~= 'string' then
  epoch = ARGV[2]
  redis.call('SET', KEYS[3], epoch)
end
return {{epoch, members[1], members[2], odd}}
"""
