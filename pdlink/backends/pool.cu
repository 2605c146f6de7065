// The work of a layer-sharded pool's lanes: epochs that streams advance and wait for, pages between a layer and a
// scratch buffer or a wire, and the stamps behind broadcasts.
//
// Addresses and sizes are multiples of sizeof(Word) where there is one, and ranges do not overlap. CHUNK, THREADS,
// MAX_RANKS and STAMP_WORDS are set when this is compiled: see pool_kernels.py.

typedef unsigned long long u64;

// The first thing that went wrong: once in device memory, for kernels to look at, and once in host memory, to be told of.
struct Trouble { long long kind, rank, wanted, seen; };
struct Words { long long address[MAX_RANKS]; long long rank[MAX_RANKS]; };
struct Stamp { long long word[STAMP_WORDS]; };

__device__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

__device__ long long acquire(long long address) {
    long long value;
    asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
}

__device__ void release(long long address, long long value) {
    asm volatile("st.release.sys.global.s64 [%0], %1;" :: "l"(address), "l"(value) : "memory");
}

__device__ void report(Trouble* here, Trouble* told, long long kind, long long rank, long long wanted, long long seen) {
    if (atomicCAS((u64*)&here->kind, 0ull, (u64)kind) != 0ull) return;
    told->rank = rank;
    told->wanted = wanted;
    told->seen = seen;
    __threadfence_system();
    release((long long)&told->kind, kind);
}

__device__ bool is_troubled(const Trouble* here) { return *(const volatile long long*)&here->kind != 0; }

// One thread: lets an epoch, which only this stream writes, be at least `value`, after everything before in the stream.
extern "C" __global__ void pool_advance(long long word, long long value) {
    __threadfence_system();
    if (acquire(word) < value) release(word, value);
}

// One thread for each word: returns when all have reached `value`, or `timeout_ns` is over, which is trouble. In trouble
// nothing is waited for; then `broken` (0: none) tells peers, before anything that follows in the stream. `value` counts
// from what is at `base` (0: from nothing), so that one graph waits for other values each time.
extern "C" __global__ void pool_wait(
    Words words, int count, long long value, const long long* base, long long timeout_ns, long long broken,
    Trouble* here, Trouble* told
) {
    const int i = threadIdx.x;
    if (base) value += *base;
    if (i < count) {
        const u64 start = nanoseconds();
        long long seen;
        while ((seen = acquire(words.address[i])) < value && !is_troubled(here)) {
            if (nanoseconds() - start > (u64)timeout_ns) {
                report(here, told, 1, words.rank[i], value, seen);
                break;
            }
            __nanosleep(100);
        }
    }
    __syncthreads();
    if (i == 0 && broken && is_troubled(here)) release(broken, value);
    __threadfence_system();
}

// One thread for each word: one that has reached `value` is trouble.
extern "C" __global__ void pool_look(Words words, int count, long long value, Trouble* here, Trouble* told) {
    const int i = threadIdx.x;
    if (i >= count) return;
    const long long seen = acquire(words.address[i]);
    if (seen >= value) report(here, told, 3, words.rank[i], value, seen);
}

extern "C" __global__ void pool_stamp(long long address, Stamp stamp, int count, const Trouble* here) {
    const int i = threadIdx.x;
    if (i < count) ((long long*)address)[i] = is_troubled(here) ? 0 : stamp.word[i];
}

extern "C" __global__ void pool_check(
    long long address, Stamp stamp, int count, long long rank, Trouble* here, Trouble* told
) {
    const int i = threadIdx.x;
    if (i >= count) return;
    const long long seen = ((const volatile long long*)address)[i];
    if (seen != stamp.word[i]) report(here, told, 2, rank, stamp.word[i], seen);
}

// `list` is a count, and that many page ids. A packed side holds the i-th of them at place i, any other at its id.
template <typename Word>
__device__ void copy_pages(
    long long source, long long target, long long page_bytes, long long unit_bytes, long long units_per_page,
    const long long* list, int source_is_packed, int target_is_packed, const Trouble* here
) {
    constexpr int PER_THREAD = (CHUNK / sizeof(Word) + THREADS - 1) / THREADS;
    constexpr int AT_ONCE = PER_THREAD < 8 ? PER_THREAD : 8;
    const bool poisons = is_troubled(here);
    const long long num_units = list[0] * units_per_page;
    for (long long unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        const long long place = unit / units_per_page, offset = unit % units_per_page * unit_bytes;
        const long long page = list[1 + place], left = page_bytes - offset;
        const int words = (int)((left < unit_bytes ? left : unit_bytes) / (long long)sizeof(Word));
        const Word* from = (const Word*)(source + (source_is_packed ? place : page) * page_bytes + offset);
        Word* to = (Word*)(target + (target_is_packed ? place : page) * page_bytes + offset);
        if (poisons) {
            for (int i = threadIdx.x; i < words * (int)sizeof(Word); i += THREADS) ((unsigned char*)to)[i] = 0xFF;
            continue;
        }
        for (int first = threadIdx.x; first < words; first += AT_ONCE * THREADS) {
            Word held[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + i * THREADS < words) held[i] = __ldcg(from + first + i * THREADS);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + i * THREADS < words) __stcg(to + first + i * THREADS, held[i]);
        }
    }
}

#define COPY(NAME, WORD)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                \
        long long source, long long target, long long page_bytes, long long unit_bytes,                        \
        long long units_per_page, const long long* list, int source_is_packed, int target_is_packed,           \
        const Trouble* here                                                                                    \
    ) {                                                                                                        \
        copy_pages<WORD>(source, target, page_bytes, unit_bytes, units_per_page, list, source_is_packed,       \
                         target_is_packed, here);                                                              \
    }

COPY(pool_copy_16, int4)
COPY(pool_copy_4, int)
COPY(pool_copy_1, char)
