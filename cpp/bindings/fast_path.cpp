// The fast path of a group's collectives: a synchronous call on plain contiguous NumPy arrays, with the default timeout, from
// the Group's method into the segment without any Python in between. What is not as simple is declined with None, before
// anything has happened, and goes the general way (phalanx/group/collective_runner.py).
//
// On MPI (phalanx/group/engines/mpi/engine.py) the segment only makes sure that all ranks have come and mean the same; then
// MPI's own function is called.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "collective_calls.hpp"
#include "gil.hpp"
#include "module.hpp"
#include "mpi_calls.hpp"
#include "shared_segment.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

class FastPath : public CollectiveCalls {
public:
    // `failed(outcome, sequence, blamed, interrupt)` raises what it means that an operation did not go well; an interrupt that
    // is a number is an error of MPI's. `describe(x, n)` is what the root of a scatter tells of the n parts of `x`, and
    // `misfit(out, words, root)` raises what it means that they do not fit. `mpi`: None where the segment moves the data.
    FastPath(SharedSegment& segment, Recorder& recorder, TurnLock& turn, const PlainArrays& arrays, nb::object kind_of,
            nb::object failed, nb::object describe, nb::object misfit, double timeout, nb::object mpi)
        : CollectiveCalls(segment.segment.rank(), segment.segment.ranks(), recorder, turn, arrays, std::move(kind_of), timeout),
          s_(segment),
          failed_(std::move(failed)),
          describe_(std::move(describe)),
          misfit_(std::move(misfit)),
          mpi_owner_(std::move(mpi)),
          mpi_(mpi_owner_.is_none() ? nullptr : nb::cast<MpiCalls*>(mpi_owner_)) {}

    nb::object barrier() {
        return run({Verb::barrier, -1, -1, -1, {}, 0}, {}, {}, Py_True, [&](const Call& call) { return s_.ops.barrier(call); },
                   [] { return 0; });
    }

    nb::object broadcast(nb::handle x, nb::handle src) {
        Array array;
        const int root = rank_of(src);
        if (root < 0 || !look(x, rank() != root, array)) return nb::none();
        if (mpi_ != nullptr && !mpi_->can_move(array.dtype, array.items)) return nb::none();
        return run({Verb::broadcast, root, static_cast<int>(array.dtype), -1, array.shape, array.bytes}, array, {}, x,
                   [&](const Call& call) { return s_.ops.broadcast(call, array.data, array.bytes, root); },
                   [&] { return mpi_->broadcast(array.data, array.items, array.dtype, root); });
    }

    nb::object all_reduce(nb::handle x, nb::handle op) {
        Array array;
        Combine how;
        const int code = look(x, true, array) ? combine(array.dtype, op, how) : -1;
        if (code < 0 || !mpi_can_combine(array.dtype, code, array.items)) return nb::none();
        return run({Verb::all_reduce, -1, static_cast<int>(array.dtype), code, array.shape, array.bytes}, array, {}, x,
                   [&](const Call& call) { return s_.ops.all_reduce(call, array.data, array.items, how); },
                   [&] {
                       const int error = mpi_->all_reduce(array.data, array.items, array.dtype, code);
                       return error == 0 ? divided(array.data, array.items, how) : error;
                   });
    }

    nb::object reduce(nb::handle x, nb::handle dst, nb::handle op) {
        Array array;
        Combine how;
        const int root = rank_of(dst);
        if (root < 0 || !look(x, rank() == root, array)) return nb::none();
        const int code = combine(array.dtype, op, how);
        if (code < 0 || !mpi_can_combine(array.dtype, code, array.items)) return nb::none();
        return run({Verb::reduce, root, static_cast<int>(array.dtype), code, array.shape, array.bytes}, array, {}, x,
                   [&](const Call& call) { return s_.ops.reduce(call, array.data, array.items, how, root); },
                   [&] {
                       const bool mine = rank() == root;
                       const int error = mpi_->reduce(array.data, array.items, array.dtype, code, root, mine);
                       return error == 0 && mine ? divided(array.data, array.items, how) : error;
                   });
    }

    nb::object all_gather(nb::handle x, nb::handle out) {
        Array source, target;
        if (!look(x, false, source) || !look(out, true, target) || source.dtype != target.dtype) return nb::none();
        if (source.bytes * ranks() != target.bytes) return nb::none();
        if (!source.apart_from(target) && (mpi_ != nullptr || !source.is_part_of(target, rank()))) return nb::none();
        if (mpi_ != nullptr && !mpi_->can_move(source.dtype, target.items)) return nb::none();
        return run({Verb::all_gather, -1, static_cast<int>(source.dtype), -1, source.shape, target.bytes}, source, target, out,
                   [&](const Call& call) { return s_.ops.all_gather(call, source.data, target.data, Lengths(source.bytes)); },
                   [&] { return mpi_->all_gather(source.data, target.data, source.items, source.dtype); });
    }

    // True on a rank that gets nothing: None would decline.
    nb::object gather(nb::handle x, nb::handle dst, nb::handle out) {
        Array source, target;
        const int root = rank_of(dst);
        if (mpi_ != nullptr || root < 0 || !look(x, false, source)) return nb::none();
        const bool receives = rank() == root;
        if (receives) {
            if (!look(out, true, target) || source.dtype != target.dtype) return nb::none();
            if (source.bytes * ranks() != target.bytes) return nb::none();
            if (!source.apart_from(target) && !source.is_part_of(target, rank())) return nb::none();
        } else if (!out.is_none()) {
            return nb::none();
        }
        return run({Verb::gather, root, static_cast<int>(source.dtype), -1, source.shape, source.bytes * ranks()}, source, target,
                   receives ? out : nb::handle(Py_True),
                   [&](const Call& call) { return s_.ops.gather(call, source.data, target.data, Lengths(source.bytes), root); },
                   [] { return 0; });
    }

    nb::object scatter(nb::handle x, nb::handle src, nb::handle out) {
        Array source, target;
        const int root = rank_of(src);
        if (mpi_ != nullptr || root < 0 || !look(out, true, target)) return nb::none();
        const bool sends = rank() == root;
        if (sends) {
            if (!look(x, false, source) || source.dtype != target.dtype || !source.divides(ranks())) return nb::none();
            if (source.bytes != target.bytes * ranks()) return nb::none();
            if (!source.apart_from(target) && !target.is_part_of(source, rank())) return nb::none();
        }
        const std::uint64_t kind = kind_of(Verb::scatter, static_cast<int>(target.dtype), -1);
        Collectives::Parts parts;
        if (sends) {
            const std::string& words = words_of(x, source);
            parts = {target.bytes, kind, {reinterpret_cast<const std::byte*>(words.data()), words.size()}};
        }
        std::string others;  // what the root has said of parts that do not fit
        bool fits = true;
        nb::object done = run(
            {Verb::scatter, root, -1, -1, {}, target.bytes * ranks()}, source, target, out,
            [&](const Call& call) {
                const Outcome outcome = s_.ops.tell_parts(call, source.data, parts, root);
                if (outcome != Outcome::done) return outcome;
                const Collectives::Parts& told = s_.ops.told();
                fits = told.bytes == target.bytes && told.kind == kind;
                if (!fits) others.assign(reinterpret_cast<const char*>(told.words.data()), told.words.size());
                return s_.ops.take_part(call, fits ? target.data : nullptr);
            },
            [] { return 0; });
        if (!fits) in_interpreter([&] { return misfit_(out, nb::bytes(others.data(), others.size()), root); });
        return done;
    }

    nb::object reduce_scatter(nb::handle x, nb::handle op, nb::handle out) {
        Array source, target;
        Combine how;
        if (!look(x, false, source) || !look(out, true, target) || source.dtype != target.dtype) return nb::none();
        if (!source.divides(ranks()) || source.bytes != target.bytes * ranks()) return nb::none();
        if (!source.apart_from(target) && (mpi_ != nullptr || !target.is_part_of(source, rank()))) return nb::none();
        const int code = combine(source.dtype, op, how);
        if (code < 0 || !mpi_can_combine(source.dtype, code, source.items)) return nb::none();
        return run({Verb::reduce_scatter, -1, static_cast<int>(source.dtype), code, source.shape, source.bytes}, source, target, out,
                   [&](const Call& call) {
                       return s_.ops.reduce_scatter(call, source.data, target.data, target.items, how);
                   },
                   [&] {
                       const int error =
                           mpi_->reduce_scatter(source.data, target.data, target.items, source.dtype, code);
                       return error == 0 ? divided(target.data, target.items, how) : error;
                   });
    }

    nb::object all_to_all(nb::handle x, nb::handle out) {
        Array source, target;
        if (!look(x, false, source) || !look(out, true, target) || source.dtype != target.dtype) return nb::none();
        if (!source.divides(ranks()) || source.bytes != target.bytes || !source.apart_from(target)) return nb::none();
        if (mpi_ != nullptr && !mpi_->can_move(source.dtype, source.items)) return nb::none();
        return run({Verb::all_to_all, -1, static_cast<int>(source.dtype), -1, source.shape, source.bytes}, source, target, out,
                   [&](const Call& call) {
                       return s_.ops.all_to_all(call, source.data, target.data, Lengths(source.bytes / ranks()));
                   },
                   [&] {
                       return mpi_->all_to_all(source.data, target.data, source.items / ranks(), source.dtype);
                   });
    }

private:
    bool mpi_can_combine(Dtype dtype, int op, std::size_t items) const noexcept {
        return mpi_ == nullptr || mpi_->can_combine(dtype, op, items);
    }

    // Makes a mean of a sum. MPI's word for "well" is 0.
    int divided(std::byte* data, std::size_t items, const Combine& how) const noexcept {
        if (how.divisor > 1) divide(data, items, how.divisor, how.dtype);
        return 0;
    }

    // What the root of a scatter says of the parts of an array; mostly it is like the one before.
    const std::string& words_of(nb::handle x, const Array& array) {
        const std::vector<Py_ssize_t> shape(array.shape.lengths, array.shape.lengths + array.shape.dims);
        if (words_.empty() || array.dtype != described_ || shape != described_shape_) {
            const nb::object words = in_interpreter([&] { return describe_(x, ranks()); });
            words_ = std::string(nb::cast<nb::bytes>(words).c_str(), nb::len(words));
            described_ = array.dtype;
            described_shape_ = shape;
        }
        return words_;
    }

    template <class F, class G>
    nb::object run(const What& what, const Array& x, const Array& out, nb::handle result, F operation, G by_mpi) {
        const std::uint64_t fixed = kind_of(what.verb, what.dtype, what.op);
        if (paused != 0 || s_.segment.aborted() || !turn_.try_acquire()) return nb::none();
        const std::uint64_t sequence = ++recorder_.sequence;
        const std::uint64_t fingerprint = fingerprint_for(fixed, sequence, what);
        Record& record = note(what, sequence, fingerprint);
        const std::int64_t began_ns = record.began_ns;
        PyThreadState* state = nullptr;
        Call call;
        call.fingerprint = fingerprint;
        call.bound.deadline_ns = began_ns + timeout_ns_;
        call.bound.interrupted = signal_raised;
        call.bound.held = &state;
        Outcome outcome;
        nb::object interrupt = nb::none();
        if (what.bytes <= worth_holding || mpi_ != nullptr) {
            // Most short operations are done before another thread could make use of the GIL.
            call.bound.before_long = [](void* held) { *static_cast<PyThreadState**>(held) = PyEval_SaveThread(); };
            call.bound.after_long = [](void* held) { take_gil(*static_cast<PyThreadState**>(held)); };
            outcome = mpi_ == nullptr ? operation(call) : s_.ops.barrier(call);
        } else {
            const WithoutGil released;
            outcome = operation(call);
        }
        if (mpi_ != nullptr && outcome == Outcome::done) {
            int error = 0;
            mpi_->inside.store(sequence, std::memory_order_relaxed);
            {
                // Always: should this thread be stuck in there, others must be able to say so.
                const WithoutGil released;
                error = by_mpi();
            }
            mpi_->inside.store(0, std::memory_order_relaxed);
            if (error != 0) {
                interrupt = nb::int_(error);
                outcome = Outcome::interrupted;
            }
        }
        const bool kept = record.sequence == sequence;  // the ring may have come round
        if (kept) record.ended_ns = monotonic_ns();
        if (outcome == Outcome::done) {
            turn_.release();
            return nb::borrow(result);
        }
        if (outcome == Outcome::interrupted && interrupt.is_none()) interrupt = nb::borrow(nb::python_error().value());
        if (!kept) {  // an error has to say what failed
            Record& again = note(what, sequence, fingerprint);
            again.began_ns = began_ns;
            again.ended_ns = monotonic_ns();
        }
        // While it is still this operation's turn: another thread's would change it.
        const nb::object blamed = nb::cast(s_.ops.blamed(outcome));
        bool detached = false;
        {
            const WithoutGil released;
            detached = s_.detach({{x.data, x.bytes}, {out.data, out.bytes}});
        }
        turn_.release();
        if (!detached && interrupt.is_none()) interrupt = nb::borrow(PyExc_MemoryError)();
        in_interpreter([&] { return failed_(static_cast<int>(outcome), sequence, blamed, interrupt); });
        throw std::logic_error("an operation failed, and nobody said so");
    }

    static constexpr std::size_t worth_holding = 16 << 10;

    SharedSegment& s_;
    nb::object failed_, describe_, misfit_;
    std::string words_;  // of the array that was described last
    Dtype described_ = Dtype::uint8;
    std::vector<Py_ssize_t> described_shape_;
    nb::object mpi_owner_;
    MpiCalls* mpi_;
};

}  // namespace

void phalanx::bind_fast_path(nb::module_& m) {
    nb::class_<TurnLock>(m, "TurnLock", "Whose turn it is to run a collective of a group.")
        .def(nb::init<>())
        .def("acquire", &TurnLock::acquire, nb::arg("timeout"))
        .def("release", &TurnLock::release);
    nb::class_<MpiCalls>(m, "MpiCalls", "MPI's collectives on one communicator, by the addresses of its functions.")
        .def(nb::init<const std::vector<MpiCalls::Word>&, std::intptr_t, MpiCalls::Word, const std::vector<MpiCalls::Word>&,
                      const std::vector<std::vector<MpiCalls::Word>>&>())
        .def_prop_ro("inside", [](const MpiCalls& calls) { return calls.inside.load(std::memory_order_relaxed); });
    nb::class_<FastPath>(m, "FastPath", "The fast path of a group's collectives; see phalanx.group.collective_runner.")
        .def(nb::init<SharedSegment&, Recorder&, TurnLock&, const PlainArrays&, nb::object, nb::object, nb::object,
                      nb::object, double, nb::object>(),
             nb::arg("segment"), nb::arg("recorder"), nb::arg("turn"), nb::arg("arrays"), nb::arg("kind_of"), nb::arg("failed"),
             nb::arg("describe"), nb::arg("misfit"), nb::arg("timeout"), nb::arg("mpi") = nb::none(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
        .def_rw("paused", &FastPath::paused)
        .def("barrier", &FastPath::barrier)
        // None is declined as anything else that is not as it should be: the general way says what is wrong.
        .def("broadcast", &FastPath::broadcast, nb::arg().none(), nb::arg().none())
        .def("all_reduce", &FastPath::all_reduce, nb::arg().none(), nb::arg().none())
        .def("reduce", &FastPath::reduce, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("all_gather", &FastPath::all_gather, nb::arg().none(), nb::arg().none())
        .def("gather", &FastPath::gather, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("scatter", &FastPath::scatter, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("reduce_scatter", &FastPath::reduce_scatter, nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("all_to_all", &FastPath::all_to_all, nb::arg().none(), nb::arg().none());
}
