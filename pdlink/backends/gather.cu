// Moves pages between addresses that this device can reach: its own memory, another device's, pinned host memory.
//
// Work is cut into units, each a part of one page of one layer. Layers are rows of a table, page pairs are held once for
// all of them, so that the tables stay small however much is moved. Every block takes every gridDim.x-th unit; all loads
// of a unit are issued before its first store, because what a link to another device needs is many bytes on the way.
//
// Addresses, strides and sizes are multiples of sizeof(Word), a unit has at most CHUNK bytes, and source and destination
// ranges do not overlap. CHUNK and THREADS are set when this is compiled: see cuda_copy.py.

struct Layer {
    long long source_base, source_stride, destination_base, destination_stride;
    long long page_bytes, unit_bytes, units_per_page, first_unit;
};

template <typename Word>
__device__ void gather(
    const long long* source_pages, const long long* destination_pages, const Layer* layers, long long num_layers,
    long long num_units
) {
    constexpr int PER_THREAD = (CHUNK / sizeof(Word) + THREADS - 1) / THREADS;
    constexpr int AT_ONCE = PER_THREAD < 8 ? PER_THREAD : 8;
    for (long long unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
        long long low = 0, high = num_layers - 1;  // the last layer whose first unit is not past this one
        while (low < high) {
            const long long middle = (low + high + 1) / 2;
            if (layers[middle].first_unit <= unit) low = middle;
            else high = middle - 1;
        }
        const Layer layer = layers[low];
        const long long page = (unit - layer.first_unit) / layer.units_per_page;
        const long long offset = (unit - layer.first_unit) % layer.units_per_page * layer.unit_bytes;
        const long long left = layer.page_bytes - offset;
        const int words = (int)((left < layer.unit_bytes ? left : layer.unit_bytes) / (long long)sizeof(Word));
        const Word* source = (const Word*)(layer.source_base + source_pages[page] * layer.source_stride + offset);
        Word* destination =
            (Word*)(layer.destination_base + destination_pages[page] * layer.destination_stride + offset);
        for (int first = threadIdx.x; first < words; first += AT_ONCE * THREADS) {
            Word held[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + i * THREADS < words) held[i] = __ldcg(source + first + i * THREADS);
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (first + i * THREADS < words) __stcg(destination + first + i * THREADS, held[i]);
        }
    }
}

#define GATHER(NAME, WORD)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                               \
        const long long* source_pages, const long long* destination_pages, const Layer* layers,               \
        long long num_layers, long long num_units                                                             \
    ) {                                                                                                       \
        gather<WORD>(source_pages, destination_pages, layers, num_layers, num_units);                         \
    }

GATHER(gather_16, int4)
GATHER(gather_4, int)
GATHER(gather_1, char)
