"""What every shared cache must do (ports/cache.py), whoever it is.

A module that runs the suite subclasses ``CacheContract`` and gives a fixture ``connect``: a
function that makes a client of one and the same cache, which is empty.
"""


class CacheContract:
    async def test_a_value_is_shared_and_a_missing_one_is_a_miss(self, connect):
        one, other = connect(), connect()
        assert await one.get("a") is None
        await one.put("a", b"\x00value\xff", ttl_s=60)
        assert await other.get("a") == b"\x00value\xff"
        assert await other.get("b") is None

    async def test_the_last_put_stays(self, connect):
        cache = connect()
        await cache.put("a", b"one", ttl_s=60)
        await cache.put("a", b"two", ttl_s=60)
        assert await cache.get("a") == b"two"

    async def test_an_empty_value_is_a_value(self, connect):
        cache = connect()
        await cache.put("a", b"", ttl_s=60)
        assert await cache.get("a") == b""

    async def test_values_go_with_time(self, connect, wait):
        cache = connect()
        await cache.put("short", b"x", ttl_s=1)
        await cache.put("long", b"y", ttl_s=60)
        await wait(1.5)
        assert await cache.get("short") is None
        assert await cache.get("long") == b"y"

    async def test_what_one_drops_nobody_has_any_more(self, connect):
        one, other = connect(), connect()
        await one.put("a", b"x", ttl_s=60)
        await one.put("b", b"y", ttl_s=60)
        await other.drop("a")
        await other.drop("never there")
        assert await one.get("a") is None
        assert await one.get("b") == b"y"
