// Collectives on arrays of a GPU for Python: addresses and lengths in bytes, the operation's fingerprint and its deadline
// (seconds on the monotonic clock). The arrays are computed. Every call returns how it ended.

#include "device.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <new>
#include <span>
#include <tuple>
#include <vector>

#include "module.hpp"
#include "recorder.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

using cuda::Address;
using cuda::Kind;
using Counts = std::vector<std::size_t>;

template <class F>
int guarded(DeviceGroup& group, std::uint64_t fingerprint, double deadline, F operation) {
    Call call;
    call.fingerprint = fingerprint;
    call.bound.deadline_ns = static_cast<std::int64_t>(deadline * 1e9);
    call.bound.interrupted = signal_raised;
    Outcome outcome;
    try {
        const WithoutGil released;
        outcome = operation(call);
    } catch (const cuda::Error& error) {
        const nb::object raised = group.exception_of(error);
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
        throw nb::python_error();
    }
    if (outcome == Outcome::interrupted) throw nb::python_error();  // what the signal's handler raised
    return static_cast<int>(outcome);
}

int run(DeviceGroup& group, const cuda::Operation& operation, std::uint64_t fingerprint, double deadline) {
    return guarded(group, fingerprint, deadline, [&](const Call& call) { return group.ops.run(call, operation); });
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

using Given = std::tuple<Address, std::uintptr_t, std::size_t>;

// An array of a rank in a scatter: on the GPU, or in the memory of the host. The other address is 0, or both are.
struct Either {
    explicit Either(const Given& given)
        : on_gpu(std::get<0>(given)), on_host(reinterpret_cast<std::byte*>(std::get<1>(given))), bytes(std::get<2>(given)) {}

    std::size_t bytes_on_host() const noexcept { return on_host == nullptr ? 0 : bytes; }

    Address on_gpu;
    std::byte* on_host;
    std::size_t bytes;
};

// As `guarded`, with arrays of the host that others may reach.
template <class F>
int guarded(DeviceGroup& group, const Either& x, const Either& out, std::uint64_t fingerprint, double deadline, F operation) {
    const int outcome = guarded(group, fingerprint, deadline, operation);
    if (outcome != static_cast<int>(Outcome::done) &&
        !group.segment.detach({{x.on_host, x.bytes_on_host()}, {out.on_host, out.bytes_on_host()}}))
        throw std::bad_alloc();
    return outcome;
}

// `counts`: bytes of each rank's part. `x` on the root only.
int scatter(DeviceGroup& group, const Given& given_x, const Given& given_out, const Counts& counts, int root,
            std::uint64_t fingerprint, double deadline) {
    const Either x(given_x), out(given_out);
    cuda::Operation o{Kind::scatter, x.on_gpu, x.bytes, out.on_gpu, out.on_gpu != 0 ? out.bytes : 0};
    o.counts = Lengths(counts);
    o.root = root;
    o.largest = total(counts);
    o.host_source = x.on_host;
    o.host_target = out.on_host;
    return guarded(group, x, out, fingerprint, deadline, [&](const Call& call) { return group.ops.run(call, o); });
}

// The outcome, and the root's words about the parts. `x` on the root only.
nb::tuple tell_parts(DeviceGroup& group, const Given& given, std::uint64_t kind, nb::bytes words, int root,
                     std::uint64_t fingerprint, double deadline) {
    const Either x(given);
    Collectives::Parts parts;
    if (group.segment.segment.rank() == root)
        parts = {x.bytes / group.segment.segment.ranks(), kind, {reinterpret_cast<const std::byte*>(words.c_str()), words.size()}};
    if (words.size() > Collectives::most_words) throw nb::value_error("the words about the parts are too long");
    const int outcome = guarded(group, x, Either({}), fingerprint, deadline, [&](const Call& call) {
        return group.ops.tell_parts(group.ops.gpu().stream, call, {x.on_gpu, x.on_host}, parts, root);
    });
    if (outcome != static_cast<int>(Outcome::done)) return nb::make_tuple(outcome, nb::bytes("", 0));
    const std::span<const std::byte> told = group.segment.ops.told().words;
    return nb::make_tuple(outcome, nb::bytes(told.data(), told.size()));
}

// After `tell_parts`, with the root's `x` once more.
int take_part(DeviceGroup& group, const Given& given_x, const Given& given_out, int root, std::uint64_t fingerprint,
              double deadline) {
    const Either x(given_x), out(given_out);
    if (out.bytes != group.segment.ops.told().bytes) throw nb::value_error("the part has another length");
    return guarded(group, x, out, fingerprint, deadline, [&](const Call& call) {
        return group.ops.take_part(group.ops.gpu().stream, call, {x.on_gpu, x.on_host}, {out.on_gpu, out.on_host}, root);
    });
}

}  // namespace

void phalanx::bind_device(nb::module_& m) {
    m.def("cuda_functions", &cuda::Driver::names, "The functions of the CUDA driver that `DeviceCollectives` is given.");
    nb::class_<DeviceGroup>(m, "DeviceCollectives", "Collectives of a segment's ranks on arrays of a GPU; see phalanx/cuda.")
        .def("__init__",
             [](DeviceGroup* self, SharedSegment& segment, const std::vector<std::uintptr_t>& functions, std::uintptr_t context,
                std::uintptr_t stream, std::uintptr_t event, int number, bool executes, int executors_process, Address closed,
                std::size_t short_bytes, std::size_t short_if_idle, std::size_t short_if_busy, std::size_t short_if_closed, double slice,
                nb::object load_kernels, nb::object error_of) {
                 new (self) DeviceGroup(segment, functions, context, stream, event, number, {executes, executors_process, closed},
                                        {short_bytes, short_if_idle, short_if_busy, short_if_closed, static_cast<std::int64_t>(slice * 1e9)},
                                        std::move(load_kernels), std::move(error_of));
             },
             nb::arg("segment"), nb::arg("functions"), nb::arg("context"), nb::arg("stream"), nb::arg("event"), nb::arg("number"),
             nb::arg("executes"), nb::arg("executors_process"), nb::arg("closed"), nb::arg("short_bytes"),
             nb::arg("short_if_idle"), nb::arg("short_if_busy"), nb::arg("short_if_closed"), nb::arg("slice_seconds"), nb::arg("load_kernels"), nb::arg("error_of"), nb::keep_alive<1, 2>())
        .def("broadcast", &broadcast)
        .def("all_reduce", &all_reduce)
        .def("reduce", &reduce_to)
        .def("reduce_scatter", &reduce_scatter)
        .def("gather", &gather)
        .def("all_to_all", &all_to_all)
        .def("scatter", &scatter)
        .def("tell_parts", &tell_parts)
        .def("take_part", &take_part)
        .def("close",
             [](DeviceGroup& group) {
                 const WithoutGil released;  // while a process ends that had the GPU, the driver may take a second for it
                 group.ops.close();
             })
        .def("blamed", [](const DeviceGroup& group, int outcome) { return group.ops.blamed(static_cast<Outcome>(outcome)); });
}
