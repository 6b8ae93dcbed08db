// The segment for Python: every collective takes buffers, the operation's fingerprint and its deadline (seconds on the
// monotonic clock), and returns how it ended.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <tuple>
#include <vector>

#include "buffer.hpp"
#include "gil.hpp"
#include "module.hpp"
#include "recorder.hpp"
#include "shared_segment.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

Call call_of(std::uint64_t fingerprint, double deadline) {
    Call call;
    call.fingerprint = fingerprint;
    call.bound.deadline_ns = static_cast<std::int64_t>(deadline * 1e9);
    call.bound.interrupted = signal_raised;
    return call;
}

// The arrays are those that others may reach.
template <class F>
int run(SharedSegment& s, std::initializer_list<const Buffer*> arrays, F operation) {
    Outcome outcome;
    bool detached = true;
    {
        const WithoutGil released;
        outcome = operation();
        if (outcome != Outcome::done)
            for (const Buffer* array : arrays) detached = s.detach({{array->data(), array->bytes()}}) && detached;
    }
    if (outcome == Outcome::interrupted) throw nb::python_error();  // what the signal's handler raised
    if (!detached) throw std::bad_alloc();
    return static_cast<int>(outcome);
}

Combine combine_of(int dtype, int op, std::int64_t divisor) {
    return {static_cast<Dtype>(dtype), static_cast<Op>(op), divisor};
}

std::size_t items(const Buffer& buffer, const Combine& how) { return buffer.bytes() / item_size(how.dtype); }

void need(bool fits) {
    if (!fits) throw nb::value_error("a buffer does not fit the others");
}

using Counts = std::vector<std::size_t>;

std::size_t total(const Counts& counts) {
    std::size_t sum = 0;
    for (const std::size_t count : counts) sum += count;
    return sum;
}

int barrier(SharedSegment& s, std::uint64_t fingerprint, double deadline) {
    return run(s, {}, [&] { return s.ops.barrier(call_of(fingerprint, deadline)); });
}

int broadcast(SharedSegment& s, nb::handle x, int root, std::uint64_t fingerprint, double deadline) {
    const Buffer buffer(x, s.segment.rank() == root ? PyBUF_SIMPLE : PyBUF_WRITABLE);
    return run(s, {&buffer}, [&] {
        return s.ops.broadcast(call_of(fingerprint, deadline), buffer.data(), buffer.bytes(), root);
    });
}

int all_reduce(SharedSegment& s, nb::handle x, int dtype, int op, std::int64_t divisor, std::uint64_t fingerprint,
               double deadline) {
    const Buffer buffer(x, PyBUF_WRITABLE);
    const Combine how = combine_of(dtype, op, divisor);
    return run(s, {&buffer}, [&] {
        return s.ops.all_reduce(call_of(fingerprint, deadline), buffer.data(), items(buffer, how), how);
    });
}

int reduce_to(SharedSegment& s, nb::handle x, int root, int dtype, int op, std::int64_t divisor, std::uint64_t fingerprint,
           double deadline) {
    const Buffer buffer(x, s.segment.rank() == root ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    const Combine how = combine_of(dtype, op, divisor);
    return run(s, {&buffer}, [&] {
        return s.ops.reduce(call_of(fingerprint, deadline), buffer.data(), items(buffer, how), how, root);
    });
}

int reduce_scatter(SharedSegment& s, nb::handle x, nb::handle out, int dtype, int op, std::int64_t divisor,
                   std::uint64_t fingerprint, double deadline) {
    const Buffer source(x, PyBUF_SIMPLE);
    const Buffer target(out, PyBUF_WRITABLE);
    const Combine how = combine_of(dtype, op, divisor);
    need(source.bytes() == target.bytes() * s.segment.ranks());
    return run(s, {&source, &target}, [&] {
        return s.ops.reduce_scatter(call_of(fingerprint, deadline), source.data(), target.data(), items(target, how), how);
    });
}

int all_gather(SharedSegment& s, nb::handle x, nb::handle out, const Counts& counts, std::uint64_t fingerprint,
               double deadline) {
    const Buffer source(x, PyBUF_SIMPLE);
    const Buffer target(out, PyBUF_WRITABLE);
    need(counts.size() == static_cast<std::size_t>(s.segment.ranks()) && counts[s.segment.rank()] == source.bytes() &&
         total(counts) == target.bytes());
    return run(s, {&source, &target}, [&] {
        return s.ops.all_gather(call_of(fingerprint, deadline), source.data(), target.data(), counts);
    });
}

int gather(SharedSegment& s, nb::handle x, nb::object out, const Counts& counts, int root, std::uint64_t fingerprint,
           double deadline) {
    const Buffer source(x, PyBUF_SIMPLE);
    need(counts.size() == static_cast<std::size_t>(s.segment.ranks()) && counts[s.segment.rank()] == source.bytes());
    const bool receives = s.segment.rank() == root;
    const Buffer target(receives ? out : nb::borrow(x), receives ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    need(!receives || total(counts) == target.bytes());
    return run(s, {&source, &target}, [&] {
        return s.ops.gather(call_of(fingerprint, deadline), source.data(), target.data(), counts, root);
    });
}

int scatter(SharedSegment& s, nb::object x, nb::handle out, const Counts& counts, int root, std::uint64_t fingerprint,
            double deadline) {
    const Buffer target(out, PyBUF_WRITABLE);
    need(counts.size() == static_cast<std::size_t>(s.segment.ranks()) && counts[s.segment.rank()] == target.bytes());
    const bool sends = s.segment.rank() == root;
    const Buffer source(sends ? x : nb::borrow(out), PyBUF_SIMPLE);
    need(!sends || total(counts) == source.bytes());
    return run(s, {&source, &target}, [&] {
        return s.ops.scatter(call_of(fingerprint, deadline), source.data(), target.data(), counts, root);
    });
}

// The outcome, the root's words about the parts, and whether it asks if all ranks could take them on a GPU.
nb::tuple tell_parts(SharedSegment& s, nb::object x, std::uint64_t kind, nb::bytes words, int root, bool asks,
                     std::uint64_t fingerprint, double deadline) {
    const bool sends = s.segment.rank() == root;
    const Buffer source(sends ? x : words, PyBUF_SIMPLE);
    const auto ranks = static_cast<std::size_t>(s.segment.ranks());
    need(!sends || (source.bytes() % ranks == 0 && words.size() <= Collectives::most_words));
    Collectives::Parts parts;
    if (sends)
        parts = {source.bytes() / ranks, kind, {reinterpret_cast<const std::byte*>(words.c_str()), words.size()},
                 asks ? Collectives::Where::shown_and_asked : Collectives::Where::shown};
    const int outcome = run(s, {&source}, [&] {
        return s.ops.tell_parts(call_of(fingerprint, deadline), source.data(), parts, root);
    });
    if (outcome != static_cast<int>(Outcome::done)) return nb::make_tuple(outcome, nb::bytes("", 0), false);
    const Collectives::Parts& told = s.ops.told();
    const bool asked = told.where == Collectives::Where::shown_and_asked;
    return nb::make_tuple(outcome, nb::bytes(told.words.data(), told.words.size()), asked);
}

// After `tell_parts`, with the root's `x` once more: nobody else has kept it.
int take_part(SharedSegment& s, nb::object x, nb::handle out, std::uint64_t fingerprint, double deadline) {
    const Buffer target(out, PyBUF_WRITABLE);
    const Buffer source(x.is_none() ? nb::borrow(out) : x, PyBUF_SIMPLE);
    need(target.bytes() == s.ops.told().bytes);
    return run(s, {&source, &target}, [&] { return s.ops.take_part(call_of(fingerprint, deadline), target.data()); });
}

int all_to_all(SharedSegment& s, nb::handle x, nb::handle out, const Counts& sizes, std::uint64_t fingerprint,
               double deadline) {
    const Buffer source(x, PyBUF_SIMPLE);
    const Buffer target(out, PyBUF_WRITABLE);
    const auto n = static_cast<std::size_t>(s.segment.ranks());
    const auto rank = static_cast<std::size_t>(s.segment.rank());
    need(sizes.size() == n * n);
    std::size_t sent = 0;
    std::size_t received = 0;
    for (std::size_t i = 0; i < n; ++i) {
        sent += sizes[rank * n + i];
        received += sizes[i * n + rank];
    }
    need(sent == source.bytes() && received == target.bytes());
    return run(s, {&source, &target}, [&] {
        return s.ops.all_to_all(call_of(fingerprint, deadline), source.data(), target.data(), sizes);
    });
}

Proof proof_of(nb::bytes words) {
    Proof proof;
    need(words.size() == proof.size());
    std::memcpy(proof.data(), words.c_str(), proof.size());
    return proof;
}

// Whether this rank can read the proof of every rank: its process, where the proof lies, and what it is.
bool try_peers(SharedSegment& s, const std::vector<std::tuple<std::int64_t, std::uint64_t, nb::bytes>>& ranks) {
    need(ranks.size() == static_cast<std::size_t>(s.segment.ranks()));
    std::vector<Peer> peers;
    for (const auto& [pid, at, proof] : ranks) peers.push_back({static_cast<pid_t>(pid), at, proof_of(proof)});
    return s.segment.try_peers(std::move(peers));
}

int flush(SharedSegment& s, double deadline) {
    return run(s, {}, [&] { return s.ops.flush(call_of(0, deadline).bound); });
}

// Bytes in this rank's heap as a NumPy array that gives them back when it is collected; None if there is no room.
nb::object empty(SharedSegment& s, std::size_t bytes) {
    struct Lease {
        std::shared_ptr<SharedMemory> memory;
        std::byte* heap;
        std::size_t start;
        std::size_t bytes;
    };
    const std::size_t rounded = std::max(Layout::rounded(bytes), page);
    const auto start = s.memory->take(rounded);
    if (!start) return nb::none();
    std::byte* heap = s.segment.heap(s.segment.rank());
    auto* lease = new Lease{s.memory, heap, *start, rounded};
    const nb::capsule owner(lease, [](void* pointer) noexcept {
        auto* held = static_cast<Lease*>(pointer);
        held->memory->give_back(held->heap, held->start, held->bytes);
        delete held;
    });
    {
        const WithoutGil released;
        put_huge_pages_together(heap + *start, rounded);
    }
    return nb::cast(nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(heap + *start, {bytes}, owner));
}

}  // namespace

void phalanx::bind_segment(nb::module_& m) {
    m.def("segment_bytes", [](int ranks, std::size_t slot, std::size_t heap) { return Layout{ranks, slot, heap}.bytes(); },
          nb::arg("ranks"), nb::arg("slot_bytes"), nb::arg("heap_bytes"), "How large the memory of such a segment is.");
    nb::class_<SharedSegment>(m, "Segment", "Memory that ranks on one machine share; see cpp/phalanx/segment.hpp.")
        .def("__init__",
             [](SharedSegment* self, int fd, int rank, int ranks, std::size_t slot, std::size_t heap, int spins, int yields,
                std::int64_t long_yield_ns, std::size_t reduced_by_all, std::size_t copy_once_from, std::size_t ahead_from,
                std::size_t past_from, int helpers, int root_helpers) {
                 if (ranks >= Verdict::others) throw nb::value_error("a segment is for fewer ranks");
                 try {
                     const Thresholds thresholds{
                         .reduced_by_all = reduced_by_all,
                         .copy_once_from = copy_once_from,
                         .ahead_from = ahead_from,
                         .past_from = past_from,
                         .helpers = helpers,
                         .root_helpers = root_helpers};
                     new (self) SharedSegment(fd, rank, Layout{ranks, slot, heap}, Patience{spins, yields, long_yield_ns}, thresholds);
                 } catch (const std::system_error& error) {
                     errno = error.code().value();
                     PyErr_SetFromErrno(PyExc_OSError);
                     throw nb::python_error();
                 }
             },
             nb::arg("fd"), nb::arg("rank"), nb::arg("ranks"), nb::arg("slot_bytes"), nb::arg("heap_bytes"),
             nb::arg("spins"), nb::arg("yields"), nb::arg("long_yield_ns"), nb::arg("reduced_by_all"), nb::arg("copy_once_from"),
             nb::arg("ahead_from"), nb::arg("past_from"), nb::arg("helpers") = 0, nb::arg("root_helpers") = 0)
        .def("show_proof", [](SharedSegment& s, nb::bytes proof) { return s.proof.set(proof_of(proof)); })
        .def("try_peers", &try_peers)
        .def_prop_ro("crowded", [](const SharedSegment& s) { return s.segment.crowded(); })
        .def_prop_rw("reads_peers", [](const SharedSegment& s) { return s.segment.reads_peers(); },
                     [](SharedSegment& s, bool possible) { s.segment.read_peers(possible); })
        .def("barrier", &barrier)
        .def("broadcast", &broadcast)
        .def("all_reduce", &all_reduce)
        .def("reduce", &reduce_to)
        .def("reduce_scatter", &reduce_scatter)
        .def("all_gather", &all_gather)
        .def("gather", &gather, nb::arg("x"), nb::arg("out").none(), nb::arg("counts"), nb::arg("root"),
             nb::arg("fingerprint"), nb::arg("deadline"))
        .def("scatter", &scatter, nb::arg("x").none(), nb::arg("out"), nb::arg("counts"), nb::arg("root"),
             nb::arg("fingerprint"), nb::arg("deadline"))
        .def("tell_parts", &tell_parts, nb::arg("x").none(), nb::arg("kind"), nb::arg("words"), nb::arg("root"),
             nb::arg("asks"), nb::arg("fingerprint"), nb::arg("deadline"))
        .def("take_part", &take_part, nb::arg("x").none(), nb::arg("out"), nb::arg("fingerprint"), nb::arg("deadline"))
        .def("all_to_all", &all_to_all)
        .def("empty", &empty)
        .def("abort",
             [](SharedSegment& s) {
                 s.segment.abort();
                 s.ops.dismiss();
                 s.memory->retire();
             })
        .def("leave",
             [](SharedSegment& s) {
                 s.segment.leave();
                 s.ops.dismiss();
                 s.memory->retire();
             })
        .def("flush", &flush)
        .def("blamed", [](const SharedSegment& s, int outcome) { return s.ops.blamed(static_cast<Outcome>(outcome)); });
}
