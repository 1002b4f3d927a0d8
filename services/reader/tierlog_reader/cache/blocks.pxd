# C's types for blocks.py, and in C what uncompiled.py has in Python. The numbers are layout.py's.
#
# All integers are signed words: words of blocks stay below 2**60, so that C reckons as Python does.

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport memcpy

cdef extern from *:
    """
    #define TL_WORD_LEN 8LL
    #define TL_NO_ADDRESS 0LL
    #define TL_FIELD_MASK ((1LL << 10) - 1)
    #define TL_PREV_MASK ((1LL << 32) - 1)
    #define TL_BACK_SHIFT 10
    #define TL_RUN_SHIFT 32
    #define TL_LENGTH_SHIFT 42
    #define TL_LENGTH_MASK ((1LL << 14) - 1)
    #define TL_USED (1LL << 56)
    #define TL_ONE_IN_RUN (1LL << 32)
    #define TL_ONE_BACK (1LL << 10)
    #define TL_STEP (1LL - (1LL << 32))
    #define TL_LOOKS_MAX 8LL

    #if defined(__GNUC__) || defined(__clang__)
    #define TL_FETCH(address) __builtin_prefetch((address), 0, 3)
    #else
    #define TL_FETCH(address) ((void) (address))
    #endif
    #define TL_LINE 64LL

    /* A processor fetches ahead what is read on and on. It stops at what rounding left empty of an
       entry's last block, and the next entry begins cold. Where that is read next, it begins ``step``
       bytes behind this one: what is empty is asked for too, so that all is one stream. */
    static void tl_copy_out(char *target, const char *source, long long length, long long step) {
        long long at;
        memcpy(target, source, (size_t) length);
        for (at = length; at < step; at += TL_LINE)
            TL_FETCH(source + at);
    }
    """
    void tl_copy_out(char* target, char* source, long long length, long long step) noexcept nogil
    const long long WORD_LEN "TL_WORD_LEN"
    const long long NO_ADDRESS "TL_NO_ADDRESS"
    const long long FIELD_MASK "TL_FIELD_MASK"
    const long long PREV_MASK "TL_PREV_MASK"
    const long long BACK_SHIFT "TL_BACK_SHIFT"
    const long long RUN_SHIFT "TL_RUN_SHIFT"
    const long long LENGTH_SHIFT "TL_LENGTH_SHIFT"
    const long long LENGTH_MASK "TL_LENGTH_MASK"
    const long long USED "TL_USED"
    const long long ONE_IN_RUN "TL_ONE_IN_RUN"
    const long long ONE_BACK "TL_ONE_BACK"
    const long long STEP "TL_STEP"
    const long long LOOKS_MAX "TL_LOOKS_MAX"


# Where the bytes of something lie that neither moves nor goes before the cache does.
cdef inline char* raw_bytes(object whole) except NULL:
    cdef Py_buffer buffer
    PyObject_GetBuffer(whole, &buffer, PyBUF_SIMPLE)
    cdef char* start = <char*> buffer.buf
    PyBuffer_Release(&buffer)
    return start


cdef inline long long* raw_words(object whole) except NULL:
    return <long long*> raw_bytes(whole)


cdef inline int copy_in(
    char* pool, long long at, object source, long long start, long long length
) except -1:
    cdef Py_buffer buffer
    PyObject_GetBuffer(source, &buffer, PyBUF_SIMPLE)
    cdef bint within = start + length <= buffer.len
    if within:
        memcpy(pool + at, <char*> buffer.buf + start, length)
    PyBuffer_Release(&buffer)
    if not within:
        raise IndexError("the source is shorter than it said")
    return 0


cdef inline int copy_out(
    char* pool, long long at, object target, long long start, long long length, long long ahead
) except -1:
    cdef Py_buffer buffer
    PyObject_GetBuffer(target, &buffer, PyBUF_WRITABLE)
    cdef bint within = start + length <= buffer.len
    if within:
        tl_copy_out(<char*> buffer.buf + start, pool + at, length, ahead)
    PyBuffer_Release(&buffer)
    if not within:
        raise ValueError("the target is shorter than the entry")
    return 0


cdef inline void copy_words(
    long long* words, long long at, long long* source, long long start, long long count
) noexcept:
    memcpy(words + at, source + start, count * sizeof(long long))


@cython.final
cdef class StreamingCache:
    # What others read, tests included
    cdef readonly object layout, _pool, _queue
    cdef readonly long long buffers, bytes_max, free_blocks, stored_bytes, entries
    cdef public long long _unused
    # What is this class's alone
    cdef object _view, _given_back
    cdef list _used_list, _templates
    cdef char* _target
    cdef char* _source
    cdef long long* _words
    cdef long long* _used_words
    cdef long long* _free_words
    cdef long long* _empty_words
    cdef long long _ends, _block_len, _block_shift, _block_bits, _word_shift, _block_mask, _stride
    cdef long long _read_on

    @cython.locals(
        words=cython.p_longlong, length=cython.longlong, need=cython.longlong, buffer=cython.longlong,
        base=cython.longlong, head=cython.longlong, first=cython.longlong, word=cython.longlong,
        run=cython.longlong, address=cython.longlong, start=cython.longlong, at=cython.longlong,
        unfilled=cython.longlong,
    )
    cpdef long long insert(self, object data)

    @cython.locals(need=cython.longlong, address=cython.longlong)
    cpdef long long reserve(self, long long length)

    @cython.locals(
        shift=cython.longlong, views=list, last=cython.longlong, end=cython.longlong,
        first=cython.longlong, count=cython.longlong, start=cython.longlong, stop=cython.longlong,
    )
    cpdef list writable(self, long long address)

    @cython.locals(
        place=cython.longlong, word=cython.longlong, length=cython.longlong, size=cython.longlong,
        room=cython.longlong, need=cython.longlong, here=cython.longlong, start=cython.longlong,
    )
    cpdef long long append(self, long long address, object data)

    @cython.locals(
        words=cython.p_longlong, shift=cython.longlong, place=cython.longlong, word=cython.longlong,
        before=cython.longlong, end=cython.longlong, prev=cython.longlong, count=cython.longlong,
        first=cython.longlong, views=list,
    )
    cpdef list get(self, long long address)

    @cython.locals(
        words=cython.p_longlong, shift=cython.longlong, place=cython.longlong, word=cython.longlong,
        before=cython.longlong, end=cython.longlong, start=cython.longlong, step=cython.longlong,
    )
    cpdef long long read_into(self, long long address, object target)

    @cython.locals(last=cython.longlong)
    cpdef long long length(self, long long address)

    @cython.locals(
        words=cython.p_longlong, place=cython.longlong, word=cython.longlong, count=cython.longlong, found=list,
    )
    cpdef list runs(self, long long address)

    @cython.locals(
        words=cython.p_longlong, bits=cython.longlong, mask=cython.longlong, last=cython.longlong,
        blocks=cython.longlong, place=cython.longlong, word=cython.longlong, run=cython.longlong,
        prev=cython.longlong,
    )
    cpdef object delete(self, long long address)

    cpdef long long bytes_of(self, long long address)

    @cython.locals(given=cython.longlong, size=cython.longlong, empty=cython.longlong, buffer=cython.longlong)
    cpdef long long give_back(self)

    cpdef object close(self)

    cdef int _check(self, long long address) except -1

    cdef long long _word_of(self, long long address)

    @cython.locals(
        blocks=cython.longlong, place=cython.longlong, word=cython.longlong, count=cython.longlong,
    )
    cdef long long _blocks_of(self, long long address)

    @cython.locals(
        at=cython.longlong, shift=cython.longlong, first=cython.longlong, count=cython.longlong,
        start=cython.longlong, size=cython.longlong,
    )
    cdef long long _read_runs(self, long long address, long long end, object target)

    @cython.locals(address=cython.longlong)
    cdef long long _insert_in_pieces(self, object data, long long length, long long need)

    @cython.locals(
        length=cython.longlong, block=cython.longlong, beside=cython.longlong, count=cython.longlong,
        buffer=cython.longlong, size=cython.longlong, run=cython.longlong,
    )
    cdef long long _grow(
        self, long long address, object source, long long at, long long need
    )

    @cython.locals(
        buffer=cython.longlong, first=cython.longlong, count=cython.longlong, size=cython.longlong,
        address=cython.longlong,
    )
    cdef long long _chain(
        self, long long prev, object source, long long at, long long length, long long need
    )

    @cython.locals(place=cython.longlong)
    cdef object _fill(
        self, long long address, long long count, object source, long long at, long long size,
        long long number,
    )

    @cython.locals(
        words=cython.p_longlong, base=cython.longlong, block=cython.longlong, best=cython.longlong,
        longest=cython.longlong, run=cython.longlong, _=cython.longlong,
    )
    cdef (long long, long long) _fitting(self, long long buffer, long long need)

    @cython.locals(
        words=cython.p_longlong, base=cython.longlong, word=cython.longlong, run=cython.longlong,
        back=cython.longlong, last=cython.longlong,
    )
    cdef object _take(self, long long buffer, long long first, long long count)

    @cython.locals(
        words=cython.p_longlong, last=cython.longlong, back=cython.longlong, after=cython.longlong,
    )
    cdef object _unlink(self, long long base, long long first, long long run)

    @cython.locals(
        words=cython.p_longlong, base=cython.longlong, head=cython.longlong, was_full=cython.bint,
        block=cython.longlong, before=cython.longlong, after=cython.longlong, beside=cython.longlong,
        run=cython.longlong, last=cython.longlong,
    )
    cdef object _give(self, long long buffer, long long first, long long count)

    @cython.locals(words=cython.p_longlong, run=cython.longlong, after=cython.longlong)
    cdef object _lengthen(
        self, long long base, long long first, long long count, long long before
    )

    cdef object _full(self, long long buffer)

    @cython.locals(buffer=cython.longlong, base=cython.longlong)
    cpdef object _open_next_buffer(self)
