// Collectives on arrays of a GPU for Python: addresses and lengths in bytes, the operation's fingerprint and its deadline
// (seconds on the monotonic clock). The arrays are computed. Every call returns how it ended.

#include "device.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <vector>

#include "module.hpp"
#include "recorder.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

using cuda::Address;
using cuda::Kind;
using Counts = std::vector<std::size_t>;

int run(DeviceGroup& group, const cuda::Operation& operation, std::uint64_t fingerprint, double deadline) {
    Call call;
    call.fingerprint = fingerprint;
    call.bound.deadline_ns = static_cast<std::int64_t>(deadline * 1e9);
    call.bound.interrupted = signal_raised;
    Outcome outcome;
    try {
        const WithoutGil released;
        outcome = group.ops.run(call, operation);
    } catch (const cuda::Error& error) {
        const nb::object raised = group.exception_of(error);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
        throw nb::python_error();
    }
    if (outcome == Outcome::interrupted) throw nb::python_error();  // what the signal's handler raised
    return static_cast<int>(outcome);
}

std::size_t total(const Counts& counts) {
    std::size_t sum = 0;
    for (const std::size_t count : counts) sum += count;
    return sum;
}

int broadcast(DeviceGroup& group, Address x, std::size_t bytes, int root, std::uint64_t fingerprint, double deadline) {
    cuda::Operation o{Kind::broadcast, x, bytes};
    o.root = root;
    o.largest = bytes;
    return run(group, o, fingerprint, deadline);
}

int all_reduce(DeviceGroup& group, Address x, std::size_t bytes, int dtype, int op, std::int64_t divisor, std::uint64_t fingerprint,
               double deadline) {
    cuda::Operation o{Kind::all_reduce, x, bytes};
    o.how = {static_cast<Dtype>(dtype), static_cast<Op>(op), divisor};
    o.largest = bytes;
    return run(group, o, fingerprint, deadline);
}

int reduce_to(DeviceGroup& group, Address x, std::size_t bytes, int root, int dtype, int op, std::int64_t divisor,
              std::uint64_t fingerprint, double deadline) {
    cuda::Operation o{Kind::reduce, x, bytes};
    o.how = {static_cast<Dtype>(dtype), static_cast<Op>(op), divisor};
    o.root = root;
    o.largest = bytes;
    return run(group, o, fingerprint, deadline);
}

int reduce_scatter(DeviceGroup& group, Address x, std::size_t x_bytes, Address out, std::size_t out_bytes, int dtype, int op,
                   std::int64_t divisor, std::uint64_t fingerprint, double deadline) {
    cuda::Operation o{Kind::reduce_scatter, x, x_bytes, out, out_bytes};
    o.how = {static_cast<Dtype>(dtype), static_cast<Op>(op), divisor};
    o.largest = x_bytes;
    return run(group, o, fingerprint, deadline);
}

// On everybody with `root` -1. `counts` are the bytes of each rank's part.
int gather(DeviceGroup& group, Address x, std::size_t x_bytes, Address out, const Counts& counts, int root, std::uint64_t fingerprint,
           double deadline) {
    cuda::Operation o{root < 0 ? Kind::all_gather : Kind::gather, x, x_bytes, out, out != 0 ? total(counts) : 0};
    o.counts = Lengths(counts);
    o.root = root;
    o.largest = total(counts);
    return run(group, o, fingerprint, deadline);
}

// `sizes`: bytes from rank i to rank j, row by row. `largest`: the most that a rank sends or gets.
int all_to_all(DeviceGroup& group, Address x, std::size_t x_bytes, Address out, std::size_t out_bytes, const Counts& sizes,
               std::size_t largest, std::uint64_t fingerprint, double deadline) {
    cuda::Operation o{Kind::all_to_all, x, x_bytes, out, out_bytes};
    o.counts = Lengths(sizes);
    o.largest = largest;
    return run(group, o, fingerprint, deadline);
}

}  // namespace

void phalanx::bind_device(nb::module_& m) {
    m.def("cuda_functions", &cuda::Driver::names, "The functions of the CUDA driver that `DeviceCollectives` is given.");
    nb::class_<DeviceGroup>(m, "DeviceCollectives", "Collectives of a segment's ranks on arrays of a GPU; see phalanx/cuda.")
        .def("__init__",
             [](DeviceGroup* self, SharedSegment& segment, const std::vector<std::uintptr_t>& functions, std::uintptr_t context,
                std::uintptr_t stream, std::uintptr_t event, int number, bool executes, int executors_process, Address closed,
                std::size_t short_bytes, std::size_t short_if_busy, double slice, nb::object load_kernels, nb::object error_of) {
                 new (self) DeviceGroup(segment, functions, context, stream, event, number, {executes, executors_process, closed},
                                        {short_bytes, short_if_busy, static_cast<std::int64_t>(slice * 1e9)},
                                        std::move(load_kernels), std::move(error_of));
             },
             nb::arg("segment"), nb::arg("functions"), nb::arg("context"), nb::arg("stream"), nb::arg("event"), nb::arg("number"),
             nb::arg("executes"), nb::arg("executors_process"), nb::arg("closed"), nb::arg("short_bytes"),
             nb::arg("short_if_busy"), nb::arg("slice_seconds"), nb::arg("load_kernels"), nb::arg("error_of"), nb::keep_alive<1, 2>())
        .def("broadcast", &broadcast)
        .def("all_reduce", &all_reduce)
        .def("reduce", &reduce_to)
        .def("reduce_scatter", &reduce_scatter)
        .def("gather", &gather)
        .def("all_to_all", &all_to_all)
        .def("close", [](DeviceGroup& group) { group.ops.close(); })
        .def("blamed", [](const DeviceGroup& group, int outcome) { return group.ops.blamed(static_cast<Outcome>(outcome)); });
}
