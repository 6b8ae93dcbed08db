// The kernels of collectives among ranks that share a GPU: one launch reads the inputs of all ranks and writes all outputs.
//
// `tools/make_kernels.py` makes combine.ptx of this file. Nothing is included, so that NVRTC alone can compile it.
//
// A piece is a run of elements: outputs[*][i] = inputs[0][i] op inputs[1][i] op ..., in the order of ranks. With one input
// it is a copy. An output may be one of the inputs: a thread has read all inputs of its elements before it writes.
// The results are the bits of cpp/phalanx/reduce.hpp: integers wrap, min and max let a NaN through, 16-bit floats are
// computed in float and rounded once, complex products round every step (compiled with --fmad=false). Only which NaN
// results from a computation is the processor's choice.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;

// The layout is that of cpp/phalanx/cuda/plan.hpp, which fills it in. Kernel parameters have 4096 bytes.
enum { POINTERS = 320, PIECES = 64 };

struct Piece {
    u64 count;    // elements
    u16 first;    // its first pointer: the inputs, then the outputs
    u16 inputs;
    u16 outputs;
    u16 aligned;  // whether all its pointers are multiples of 16
};

struct Plan {
    u64 pointers[POINTERS];
    Piece pieces[PIECES];  // one for each blockIdx.y
    double divisor;        // 1, or the number of ranks of a mean
    u64 closed;            // where a word on the GPU is: once it is not 0, nothing is written any more
    u32 op;
    u32 unused;
};

enum { SUM, PROD, MIN, MAX, BAND, BOR, BXOR };  // as Op in cpp/phalanx/reduce.hpp

union Block {
    uint4 whole;
    u8 bytes[16];
};

// -- formats: how elements lie in memory, what they are computed in, and the operations they have ------------------------

template <class Unsigned, class Ordered>
struct Integer {
    typedef Unsigned Stored;
    typedef Unsigned Wide;
    static __device__ Wide widen(Stored x) { return x; }
    static __device__ Stored narrow(Wide x) { return x; }
    static __device__ Wide divide(Wide x, double) { return x; }
    static __device__ Wide combine(Wide a, Wide b, u32 op) {
        switch (op) {
            case SUM: return (Wide)(a + b);
            case PROD: return (Wide)((u64)a * (u64)b);
            case MIN: return (Ordered)a < (Ordered)b ? a : b;
            case MAX: return (Ordered)a > (Ordered)b ? a : b;
            case BAND: return (Wide)(a & b);
            case BOR: return (Wide)(a | b);
            default: return (Wide)(a ^ b);
        }
    }
};

struct Boolean {  // as in NumPy: a sum is "or", a product is "and"
    typedef u8 Stored;
    typedef u8 Wide;
    static __device__ Wide widen(Stored x) { return x; }
    static __device__ Stored narrow(Wide x) { return x; }
    static __device__ Wide divide(Wide x, double) { return x; }
    static __device__ Wide combine(Wide a, Wide b, u32 op) {
        switch (op) {
            case SUM: case MAX: case BOR: return (a | b) != 0;
            case BXOR: return (a != 0) != (b != 0);
            default: return (a != 0) & (b != 0);
        }
    }
};

template <class T>
__device__ T combine_floats(T a, T b, u32 op) {
    switch (op) {
        case SUM: return a + b;
        case PROD: return a * b;
        case MIN: return (a < b) | (a != a) ? a : b;
        default: return (a > b) | (a != a) ? a : b;
    }
}

template <class T>
struct Floating {
    typedef T Stored;
    typedef T Wide;
    static __device__ Wide widen(Stored x) { return x; }
    static __device__ Stored narrow(Wide x) { return x; }
    static __device__ Wide divide(Wide x, double by) { return x / (T)by; }
    static __device__ Wide combine(Wide a, Wide b, u32 op) { return combine_floats(a, b, op); }
};

struct Half {  // as PortableHalf in cpp/phalanx/half.hpp
    typedef u16 Stored;
    typedef float Wide;
    static __device__ Wide widen(Stored half) {
        const u32 infinite = 0x7c00u << 13;
        const u32 shifted = (u32)(half & 0x7fffu) << 13;
        const u32 exponent = shifted & infinite;
        const u32 rebased = shifted + ((127u - 15u) << 23);
        const float subnormal = __uint_as_float(rebased + (1u << 23)) - __uint_as_float(113u << 23);
        const u32 special = rebased + ((128u - 16u) << 23);
        const u32 finite = exponent == 0 ? __float_as_uint(subnormal) : rebased;
        return __uint_as_float((exponent == infinite ? special : finite) | ((u32)(half & 0x8000u) << 16));
    }
    static __device__ Stored narrow(Wide value) {
        const u32 bits = __float_as_uint(value);
        const u32 magnitude = bits & 0x7fffffffu;
        const u32 magic = (127u - 15u + 23u - 10u + 1u) << 23;
        const u32 subnormal = __float_as_uint(__uint_as_float(magnitude) + __uint_as_float(magic)) - magic;
        const u32 odd = (magnitude >> 13) & 1u;
        const u32 normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
        const u32 nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        u32 half = magnitude < (113u << 23) ? subnormal : normal;
        half = magnitude >= ((127u + 16u) << 23) ? 0x7c00u : half;
        half = magnitude > 0x7f800000u ? nan : half;
        return (u16)(half | ((bits >> 16) & 0x8000u));
    }
    static __device__ Wide divide(Wide x, double by) { return x / (float)by; }
    static __device__ Wide combine(Wide a, Wide b, u32 op) { return combine_floats(a, b, op); }
};

struct Bfloat16 {
    typedef u16 Stored;
    typedef float Wide;
    static __device__ Wide widen(Stored brain) { return __uint_as_float((u32)brain << 16); }
    static __device__ Stored narrow(Wide value) {
        const u32 bits = __float_as_uint(value);
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return (u16)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
    static __device__ Wide divide(Wide x, double by) { return x / (float)by; }
    static __device__ Wide combine(Wide a, Wide b, u32 op) { return combine_floats(a, b, op); }
};

template <class T>
struct Complex {
    struct Stored { T re, im; };
    typedef Stored Wide;
    static __device__ Wide widen(Stored x) { return x; }
    static __device__ Stored narrow(Wide x) { return x; }
    static __device__ Wide divide(Wide x, double by) { return Wide{x.re / (T)by, x.im / (T)by}; }
    static __device__ Wide combine(Wide a, Wide b, u32 op) {
        if (op == SUM) return Wide{a.re + b.re, a.im + b.im};
        return Wide{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    }
};

// -- the kernel: each thread has the elements of 16 bytes ----------------------------------------------------------------

template <class Format>
__device__ void combine(const Plan& plan) {
    typedef typename Format::Stored Stored;
    typedef typename Format::Wide Wide;
    constexpr int elements = 16 / sizeof(Stored);
    // Inputs that a thread asks for before it combines the first of them. Fewer where that makes the code long.
    constexpr int AHEAD = elements <= 4 ? 4 : elements == 8 ? 2 : 1;
    const Piece piece = plan.pieces[blockIdx.y];
    const u64 start = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * elements;
    if (start >= piece.count) return;
    const bool whole = piece.aligned && start + elements <= piece.count;
    const int here = start + elements <= piece.count ? elements : (int)(piece.count - start);
    const u64* pointers = plan.pointers + piece.first;
    // Asked for with the inputs, and looked at when they are there. By way of the cache of the multiprocessor, which is empty
    // when a kernel begins: half a million warps that all read one place of the GPU's memory would wait for each other there.
    u32 closed;
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(closed) : "l"(plan.closed));

    Wide total[elements];
    for (int first = 0; first < piece.inputs; first += AHEAD) {
        union { Block block; Stored values[elements]; } next[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= piece.inputs) continue;
            const Stored* from = (const Stored*)pointers[first + i] + start;
            if (whole) {
                next[i].block.whole = *(const uint4*)from;
            } else {
#pragma unroll
                for (int k = 0; k < elements; ++k)
                    if (k < here) next[i].values[k] = from[k];
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
            if (first + i >= piece.inputs) continue;
#pragma unroll
            for (int k = 0; k < elements; ++k) {
                const Wide value = Format::widen(next[i].values[k]);
                total[k] = first + i == 0 ? value : Format::combine(total[k], value, plan.op);
            }
        }
    }
    if (closed != 0) return;
    union { Block block; Stored values[elements]; } result;
#pragma unroll
    for (int k = 0; k < elements; ++k)
        result.values[k] = Format::narrow(plan.divisor == 1 ? total[k] : Format::divide(total[k], plan.divisor));
    for (int i = 0; i < piece.outputs; ++i) {
        Stored* to = (Stored*)pointers[piece.inputs + i] + start;
        if (whole) {
            *(uint4*)to = result.block.whole;
        } else {
#pragma unroll
            for (int k = 0; k < elements; ++k)
                if (k < here) to[k] = result.values[k];
        }
    }
}

#define KERNEL(name, ...) \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Plan plan) { combine<__VA_ARGS__>(plan); }

KERNEL(combine_bool, Boolean)
KERNEL(combine_int8, Integer<u8, s8>)
KERNEL(combine_int16, Integer<u16, s16>)
KERNEL(combine_int32, Integer<u32, s32>)
KERNEL(combine_int64, Integer<u64, s64>)
KERNEL(combine_uint8, Integer<u8, u8>)
KERNEL(combine_uint16, Integer<u16, u16>)
KERNEL(combine_uint32, Integer<u32, u32>)
KERNEL(combine_uint64, Integer<u64, u64>)
KERNEL(combine_float16, Half)
KERNEL(combine_bfloat16, Bfloat16)
KERNEL(combine_float32, Floating<float>)
KERNEL(combine_float64, Floating<double>)
KERNEL(combine_complex64, Complex<float>)
KERNEL(combine_complex128, Complex<double>)
