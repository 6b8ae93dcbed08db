// The collectives of a group on arrays of one GPU (phalanx/cuda/collectives.hpp), as Python and the fast path hold them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "phalanx/cuda/collectives.hpp"
#include "shared_segment.hpp"

namespace phalanx {

namespace nb = nanobind;

class DeviceGroup {
public:
    using Word = std::uintptr_t;

    // `functions`: as `cuda_functions()` names them. `load_kernels()` gives one for each Dtype, and is called when the first is
    // needed. `error_of(function, code)` makes the exception for a function of the driver that failed.
    DeviceGroup(SharedSegment& segment, const std::vector<Word>& functions, Word context, Word stream, Word event, int number,
                const cuda::DeviceCollectives::Sharing& sharing, const cuda::Routing& routing, nb::object load_kernels,
                nb::object error_of)
        : segment(segment),
          load_kernels_(std::move(load_kernels)),
          error_of_(std::move(error_of)),
          ops(segment.segment, segment.ops,
              cuda::Gpu(cuda::Driver(functions), pointer(context), pointer(stream), pointer(event), number), sharing, routing,
              [this] { return kernels(); }, [&segment](std::size_t bytes) { return take(segment, bytes); },
              [&segment](std::byte* at, std::size_t bytes) {
                  std::byte* heap = segment.segment.heap(segment.segment.rank());
                  segment.memory->give_back(heap, static_cast<std::size_t>(at - heap), bytes);
              }) {}

    // What to raise for a failure.
    nb::object exception_of(const cuda::Error& error) {
        if (failure_.is_valid()) return std::exchange(failure_, nb::object());
        return in_interpreter([&] { return error_of_(error.what(), error.code); });
    }

    SharedSegment& segment;

private:
    nb::object load_kernels_, error_of_;
    nb::object failure_;  // of `load_kernels`

    static void* pointer(Word word) noexcept { return reinterpret_cast<void*>(word); }

    static std::byte* take(SharedSegment& segment, std::size_t bytes) {
        const auto start = segment.memory->take(bytes);
        return start ? segment.segment.heap(segment.segment.rank()) + *start : nullptr;
    }

    std::vector<void*> kernels() {
        const WithGil gil;
        try {
            std::vector<void*> found;
            for (const Word kernel : nb::cast<std::vector<Word>>(in_interpreter([&] { return load_kernels_(); })))
                found.push_back(pointer(kernel));
            return found;
        } catch (const nb::python_error& raised) {
            failure_ = nb::borrow(raised.value());
        }
        throw cuda::Error("cuModuleLoadData", 0);
    }

public:
    cuda::DeviceCollectives ops;
};

}  // namespace phalanx
