// The kernels alone, without Python: run under the sanitizers by `make sanitize`.

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "check.hpp"
#include "phalanx/reduce.hpp"

#define PHALANX_LOOPS of_test
#include "phalanx/half.hpp"

using namespace phalanx;
using namespace phalanx::of_test;

namespace {

constexpr int dtypes = 15;
constexpr int ops = 7;

template <class T>
std::vector<T> reduced(std::vector<T> dst, const std::vector<T>& src, Dtype dtype, Op op) {
    CHECK(dst.size() == src.size());
    CHECK(reduce(dst.data(), src.data(), dst.size() * sizeof(T) / item_size(dtype), dtype, op));
    return dst;
}

void integers_wrap() {
    using I8 = std::vector<std::int8_t>;
    CHECK((reduced<std::int8_t>({127, -128}, {1, -1}, Dtype::int8, Op::sum) == I8{-128, 127}));
    using U16 = std::vector<std::uint16_t>;
    CHECK((reduced<std::uint16_t>({65535}, {65535}, Dtype::uint16, Op::prod) == U16{1}));
    constexpr auto most = std::numeric_limits<std::int64_t>::max();
    constexpr auto least = std::numeric_limits<std::int64_t>::min();
    using I64 = std::vector<std::int64_t>;
    CHECK((reduced<std::int64_t>({most}, {1}, Dtype::int64, Op::sum) == I64{least}));
    CHECK((reduced<std::int64_t>({least}, {-1}, Dtype::int64, Op::prod) == I64{least}));
    CHECK((reduced<std::int64_t>({-5, 5}, {3, 3}, Dtype::int64, Op::min) == I64{-5, 3}));
    using U64 = std::vector<std::uint64_t>;
    CHECK((reduced<std::uint64_t>({~0ull}, {3}, Dtype::uint64, Op::min) == U64{3}));
    CHECK((reduced<std::uint64_t>({12, 12}, {10, 10}, Dtype::uint64, Op::bxor) == U64{6, 6}));
}

void booleans_are_zero_or_one() {
    using B = std::vector<std::uint8_t>;
    CHECK((reduced<std::uint8_t>({0, 1, 2, 0}, {0, 1, 1, 4}, Dtype::boolean, Op::sum) == B{0, 1, 1, 1}));
    CHECK((reduced<std::uint8_t>({0, 1, 2, 0}, {0, 1, 1, 4}, Dtype::boolean, Op::prod) == B{0, 1, 1, 0}));
    CHECK((reduced<std::uint8_t>({0, 1, 2, 0}, {0, 1, 1, 4}, Dtype::boolean, Op::bxor) == B{0, 0, 0, 1}));
}

template <class T>
void nans_go_through(Dtype dtype) {
    const T nan = std::numeric_limits<T>::quiet_NaN();
    for (const Op op : {Op::min, Op::max}) {
        // Long enough for whole vectors and a rest.
        std::vector<T> a(19, T(1)), b(19, T(2));
        a[0] = b[1] = a[17] = b[18] = nan;
        const auto c = reduced(a, b, dtype, op);
        for (std::size_t i = 0; i < c.size(); ++i)
            CHECK((i == 0 || i == 1 || i == 17 || i == 18) ? std::isnan(c[i]) : c[i] == (op == Op::min ? T(1) : T(2)));
    }
}

void complex_products_round_every_step() {
    const auto c = reduced<float>({1, 2}, {2, -1}, Dtype::complex64, Op::prod);
    CHECK((c == std::vector<float>{4, 3}));
    // Fused, the real part would be the rounding error of the product instead of zero.
    const float third = 1.0f / 3.0f;
    const auto d = reduced<float>({third, third}, {third, third}, Dtype::complex64, Op::prod);
    CHECK(d[0] == 0.0f);
}

// Both versions of float16 for all 65536 values, and rounding at and around every midpoint.
void portable_half_is_exact() {
    for (std::uint32_t i = 0; i < 0x10000; ++i) {
        const auto half = static_cast<std::uint16_t>(i);
        const float value = PortableHalf::widen(half);
        const float native = Half::widen(half);
        if (std::isnan(value)) {
            CHECK(std::isnan(native));
            CHECK(PortableHalf::narrow(value) == (half | 0x200));
            continue;
        }
        CHECK(std::bit_cast<std::uint32_t>(value) == std::bit_cast<std::uint32_t>(native));
        CHECK(PortableHalf::narrow(value) == half);
        if ((half & 0x7c00) == 0x7c00) continue;
        const auto bits = std::bit_cast<std::uint32_t>(value);
        const float next = PortableHalf::widen(static_cast<std::uint16_t>(half + 1));
        const float middle = std::isinf(next) ? std::copysign(65520.0f, value) : (value + next) / 2;
        const auto even = static_cast<std::uint16_t>((half & 1) != 0 ? half + 1 : half);
        CHECK(PortableHalf::narrow(middle) == even);
        for (const float near : {middle, std::nextafter(middle, value), std::nextafter(middle, next),
                                 std::bit_cast<float>(bits + 1), value * 1.0001f})
            CHECK(PortableHalf::narrow(near) == Half::narrow(near));
    }
    for (const float big : {65519.99f, 65520.0f, 1e30f, INFINITY}) CHECK(PortableHalf::narrow(big) == Half::narrow(big));
}

void bfloat16_rounds_to_even() {
    CHECK(Bfloat16::narrow(1.0f + 0x1p-8f) == 0x3f80);
    CHECK(Bfloat16::narrow(1.0f + 3 * 0x1p-8f) == 0x3f82);
    CHECK(Bfloat16::narrow(-std::numeric_limits<float>::quiet_NaN()) == 0x7fc0);
    CHECK(Bfloat16::narrow(std::numeric_limits<float>::max()) == 0x7f80);
    CHECK(Bfloat16::narrow(-INFINITY) == 0xff80);
}

void division_by_a_power_of_two_is_a_division() {
    for (const float value : {1.0f, 3.0f, 1e-38f, 1e-45f, 3.4e38f, -0.0f, 7e-44f}) {
        for (const std::int64_t n : {1, 2, 4, 1024, 3, 1000}) {
            float x = value;
            CHECK(divide(&x, 1, n, Dtype::float32));
            CHECK(x == value / static_cast<float>(n));
        }
    }
    float whole = 1;
    CHECK(divide(&whole, 0, 3, Dtype::float32) && whole == 1);
    int integer = 4;
    CHECK(!divide(&integer, 1, 2, Dtype::int32) && integer == 4);
}

// Every kernel on exact allocations of every small size, at every misalignment: the address sanitizer sees one byte more.
void no_byte_beyond_the_end() {
    for (int d = 0; d < dtypes; ++d) {
        const auto dtype = static_cast<Dtype>(d);
        const std::size_t size = item_size(dtype);
        for (std::size_t count = 0; count < 40; ++count) {
            for (std::size_t shift = 0; shift < 3; ++shift) {
                auto* dst = static_cast<std::byte*>(std::malloc(count * size + shift));
                auto* src = static_cast<std::byte*>(std::malloc(count * size + shift));
                for (int o = 0; o < ops; ++o) {
                    for (std::size_t i = 0; i < count * size + shift; ++i) {
                        dst[i] = static_cast<std::byte>(37 * i + 11);
                        src[i] = static_cast<std::byte>(91 * i + 7);
                    }
                    (void)reduce(dst + shift, src + shift, count, dtype, static_cast<Op>(o));
                    for (std::size_t i = 0; i < shift; ++i) CHECK(dst[i] == static_cast<std::byte>(37 * i + 11));
                }
                (void)divide(dst + shift, count, 3, dtype);
                std::free(dst);
                std::free(src);
            }
        }
    }
}

void unknown_codes_change_nothing() {
    float x = 1, y = 2;
    CHECK(item_size(static_cast<Dtype>(99)) == 0);
    CHECK(!reduce(&x, &y, 1, static_cast<Dtype>(99), Op::sum));
    CHECK(!reduce(&x, &y, 1, static_cast<Dtype>(-1), Op::sum));
    for (int d = 0; d < dtypes; ++d) CHECK(!reduce(&x, &y, 0, static_cast<Dtype>(d), static_cast<Op>(7)));
    CHECK(!reduce(&x, &y, 1, Dtype::float32, Op::band));
    CHECK(!reduce(&x, &y, 1, Dtype::bfloat16, Op::bxor));
    CHECK(!reduce(&x, &y, 0, Dtype::complex64, Op::min));
    CHECK(x == 1);
}

// Threads that reduce neighbouring parts of one array from one source: as the ranks of a segment will.
void threads_share_a_source() {
    constexpr std::size_t parts = 4, each = 10'007;
    std::vector<float> dst(parts * each, 1.0f);
    const std::vector<float> src(parts * each, 2.0f);
    std::vector<std::thread> threads;
    for (std::size_t part = 0; part < parts; ++part)
        threads.emplace_back([&, part] {
            for (int turn = 0; turn < 20; ++turn) {
                reduce(dst.data() + part * each, src.data() + part * each, each, Dtype::float32, Op::sum);
                reduce(dst.data() + part * each, src.data(), each, Dtype::float32, Op::max);
            }
        });
    for (auto& thread : threads) thread.join();
    for (const float value : dst) CHECK(value == 41.0f);
}

}  // namespace

int main() {
    integers_wrap();
    booleans_are_zero_or_one();
    nans_go_through<float>(Dtype::float32);
    nans_go_through<double>(Dtype::float64);
    complex_products_round_every_step();
    portable_half_is_exact();
    bfloat16_rounds_to_even();
    division_by_a_power_of_two_is_a_division();
    no_byte_beyond_the_end();
    unknown_codes_change_nothing();
    threads_share_a_source();
    std::printf("%d checks, %d failed\n", checks.load(), failures.load());
    return failures == 0 ? 0 : 1;
}
