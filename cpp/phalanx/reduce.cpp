// Which loops a reduction uses: those for the best instruction set that this processor has.

#include "reduce.hpp"

#include <array>
#include <atomic>
#include <string_view>

// Defined by the files of these names.
#define PHALANX_DECLARE_LOOPS(name)                                                                                       \
    namespace phalanx::name {                                                                                             \
    bool reduce_two(std::byte*, const std::byte*, const std::byte*, std::size_t, Dtype, Op) noexcept;                     \
    bool divide_all(void*, std::size_t, std::int64_t, Dtype) noexcept;                                                    \
    bool reduce_all(std::byte*, const std::byte* const*, int, std::size_t, std::size_t, Dtype, Op, std::int64_t) noexcept; \
    }

PHALANX_DECLARE_LOOPS(baseline)
PHALANX_DECLARE_LOOPS(avx2)
PHALANX_DECLARE_LOOPS(avx512)

namespace phalanx {
namespace {

struct Loops {
    const char* name;
    decltype(&baseline::reduce_two) reduce_two;
    decltype(&baseline::divide_all) divide_all;
    decltype(&baseline::reduce_all) reduce_all;
    bool (*runs_here)();
};

// From the oldest to the newest.
constexpr Loops all_loops[] = {
    {"baseline", baseline::reduce_two, baseline::divide_all, baseline::reduce_all, [] { return true; }},
#if defined(PHALANX_X86_LOOPS)
    {"avx2", avx2::reduce_two, avx2::divide_all, avx2::reduce_all,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }},
    // Older processors lower their clock for vectors of this width, and lose more than they gain.
    {"avx512", avx512::reduce_two, avx512::divide_all, avx512::reduce_all,
     [] {
         return __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
     }},
#endif
};

struct Found {
    std::array<const char*, std::size(all_loops)> names{};
    std::size_t count = 0;
    std::atomic<const Loops*> used = nullptr;

    Found() noexcept {
        for (const Loops& loops : all_loops)
            if (loops.runs_here()) {
                names[count++] = loops.name;
                used = &loops;
            }
    }
};

Found& found() noexcept {
    static Found here;
    return here;
}

const Loops& loops() noexcept { return *found().used.load(std::memory_order_relaxed); }

}  // namespace

bool reduce(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Dtype dtype, Op op) noexcept {
    return loops().reduce_two(dst, left, right, count, dtype, op);
}

bool divide(void* x, std::size_t count, std::int64_t n, Dtype dtype) noexcept { return loops().divide_all(x, count, n, dtype); }

bool reduce_many(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, Dtype dtype, Op op,
                 std::int64_t divisor) noexcept {
    return loops().reduce_all(dst, sources, n, count, item_size(dtype), dtype, op, divisor);
}

std::span<const char* const> instruction_sets() noexcept { return std::span(found().names).first(found().count); }

bool use_instruction_set(const char* name) noexcept {
    for (const Loops& loops : all_loops)
        if (std::string_view(loops.name) == name && loops.runs_here()) {
            found().used = &loops;
            return true;
        }
    return false;
}

}  // namespace phalanx
