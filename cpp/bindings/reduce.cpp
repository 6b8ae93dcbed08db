// The reduction kernels for Python: converts arguments and lets go of the GIL where that pays.

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>

#include "buffer.hpp"
#include "gil.hpp"
#include "module.hpp"
#include "phalanx/reduce.hpp"

namespace nb = nanobind;
using phalanx::Buffer;

namespace {

// Below this, a kernel is done sooner than another thread could make use of the GIL, and to get it back could take long.
constexpr std::size_t worth_releasing = 64 << 10;

std::size_t count_items(const Buffer& buffer, int dtype) {
    const std::size_t size = phalanx::item_size(static_cast<phalanx::Dtype>(dtype));
    if (size == 0) throw nb::value_error("unknown dtype code");
    if (buffer.bytes() % size != 0) throw nb::value_error("the buffer does not hold a whole number of items");
    return buffer.bytes() / size;
}

template <class F>
bool without_gil(std::size_t bytes, F run) {
    if (bytes < worth_releasing) return run();
    const phalanx::WithoutGil released;
    return run();
}

void reduce_buffers(nb::handle dst, nb::handle src, int dtype, int op) {
    const Buffer to(dst, PyBUF_WRITABLE);
    const Buffer from(src, PyBUF_SIMPLE);
    if (to.bytes() != from.bytes()) throw nb::value_error("dst and src differ in size");
    const std::size_t count = count_items(to, dtype);
    const bool done = without_gil(to.bytes(), [&] {
        return phalanx::reduce(to.data(), from.data(), count, static_cast<phalanx::Dtype>(dtype),
                               static_cast<phalanx::Op>(op));
    });
    if (!done) throw nb::value_error("this dtype has no such operation");
}

void divide_buffer(nb::handle x, std::int64_t n, int dtype) {
    const Buffer buffer(x, PyBUF_WRITABLE);
    const std::size_t count = count_items(buffer, dtype);
    const bool done = without_gil(buffer.bytes(), [&] {
        return phalanx::divide(buffer.data(), count, n, static_cast<phalanx::Dtype>(dtype));
    });
    if (!done) throw nb::value_error("this dtype has no division");
}

nb::list sets() {
    nb::list names;
    for (const char* name : phalanx::instruction_sets()) names.append(name);
    return names;
}

void use_set(const char* name) {
    if (!phalanx::use_instruction_set(name)) throw nb::value_error("this processor or this build does not have these instructions");
}

}  // namespace

void phalanx::bind_reduce(nb::module_& m) {
    m.def("instruction_sets", &sets, "The instruction sets that reductions can use here, the best one last.");
    m.def("use_instruction_set", &use_set, nb::arg("name"), "Has all reductions use another one of them, for tests.");
    m.def("reduce", &reduce_buffers, nb::arg("dst"), nb::arg("src"), nb::arg("dtype"), nb::arg("op"),
          "dst[i] = op(dst[i], src[i]) over two contiguous buffers.");
    m.def("divide", &divide_buffer, nb::arg("x"), nb::arg("n"), nb::arg("dtype"), "x[i] = x[i] / n over a contiguous buffer.");
}
