// What the fast paths of collectives have in common: they look at a call on plain arrays, give it its number, and note it in
// the journal. How the data moves is up to them (fast_path.cpp, fast_steps.cpp).
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "phalanx/collectives.hpp"
#include "phalanx/fingerprint.hpp"
#include "plain_array.hpp"
#include "recorder.hpp"
#include "tensor_list.hpp"
#include "turn_lock.hpp"

namespace phalanx {

namespace nb = nanobind;

enum class Verb : int {
    barrier, broadcast, all_reduce, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter,
    broadcast_object, all_gather_object, gather_object, scatter_object
};
inline constexpr const char* verb_names[] = {"barrier",          "broadcast",         "all_reduce",    "reduce",  "all_gather",
                                             "reduce_scatter",   "all_to_all",        "gather",        "scatter",
                                             "broadcast_object", "all_gather_object", "gather_object", "scatter_object"};
inline constexpr int verbs = 13;

inline constexpr bool moves_objects(Verb verb) noexcept { return verb >= Verb::broadcast_object; }

// As Dtype and Op in reduce.hpp; a mean is a sum and a division.
constexpr int dtypes = 15;
inline constexpr const char* op_names[] = {"sum", "prod", "min", "max", "band", "bor", "bxor", "mean"};
constexpr int ops = 8;
constexpr int mean = 7;

// In the order of `phalanx._native.PLAIN`, and then what only tensors have.
inline constexpr Dtype plain_dtypes[] = {Dtype::boolean, Dtype::int8,    Dtype::uint8,   Dtype::int16,     Dtype::uint16,   Dtype::int32,
                                  Dtype::uint32,  Dtype::int64,   Dtype::uint64,  Dtype::int64,     Dtype::uint64,   Dtype::float16,
                                  Dtype::float32, Dtype::float64, Dtype::complex64, Dtype::complex128, Dtype::bfloat16};

// An array that the fast path can take.
struct Array {
    nb::handle object{};  // whose memory it is
    std::byte* data = nullptr;
    std::byte* const* parts = nullptr;  // where the part of each rank lies, if they lie apart: then there is no `data`
    int cuts = 1;                       // how many there are
    std::size_t bytes = 0;              // of all together
    std::size_t items = 0;
    int dims = 0;
    std::array<Py_ssize_t, Record::most_dims> lengths;  // as many as there are dims
    Dtype dtype = Dtype::uint8;
    int gpu = -1;            // the number of the GPU that it lies on; -1 on the CPU
    void* stream = nullptr;  // that GPU's current one when the call was made

    bool divides(int parts) const noexcept { return dims > 0 && lengths[0] % parts == 0; }
    bool apart_from(const Array& other) const noexcept {
        for (int i = 0; i < cuts; ++i)
            for (int k = 0; k < other.cuts; ++k)
                if (!are_apart(at(i), bytes / cuts, other.at(k), other.bytes / other.cuts)) return false;
        return true;
    }
    // Whether this is one of the parts of the whole, which all have this length, and no other part lies there.
    bool is_part_of(const Array& whole, int part) const noexcept {
        if (whole.parts == nullptr) return data == whole.data + static_cast<std::size_t>(part) * bytes;
        for (int i = 0; i < whole.cuts; ++i)
            if (i != part && !are_apart(data, bytes, whole.at(i), bytes)) return false;
        return data == whole.at(part);
    }

    Sources sources() const noexcept { return parts != nullptr ? Sources::apart(parts) : Sources(data); }
    Targets targets() const noexcept { return parts != nullptr ? Targets::apart(parts) : Targets(data); }

private:
    const std::byte* at(int i) const noexcept { return parts != nullptr ? parts[i] : data; }
    static bool are_apart(const std::byte* one, std::size_t bytes, const std::byte* other, std::size_t others) noexcept {
        return one + bytes <= other || other + others <= one;
    }
};

// A collective that was looked at, and can be done.
struct Operation {
    Verb verb;
    int root = -1;   // -1: none
    int dtype = -1;  // -1: none, or not the same on all ranks
    int op = -1;     // -1: none
    Combine how{};
    Array x{}, out{};
    std::size_t bytes = 0;
    nb::handle result{};  // invalid: there is none
    std::int64_t timeout_ns = 0;
    std::int64_t deadline_ns = 0;  // 0: counted from when it runs
    std::uint64_t kind = 0;        // the part of the fingerprint that stays
    std::uint64_t sequence = 0;    // 0: it has no number yet
    std::uint64_t fingerprint = 0;
    bool on_gpu = false;
    void* objects = nullptr;  // what moves them, of a verb that does

    // Its shape, where that is the same on all ranks.
    int dims() const noexcept { return verb == Verb::scatter ? 0 : x.dims; }
    double seconds() const noexcept { return static_cast<double>(timeout_ns) / 1e9; }
};

class CollectiveCalls {
public:
    int paused = 0;  // operations under way in another thread, which come first

    virtual ~CollectiveCalls() = default;

    // The one that a Python object is; null if it is something else.
    static CollectiveCalls* of(nb::handle object) {
        for (const Kind& kind : kinds_of_paths())
            if (Py_TYPE(object.ptr()) == kind.type) return kind.pointer(object);
        return nullptr;
    }

    // From now on `of` knows these objects.
    template <class Path>
    static void add_kind(const nb::class_<Path>& path) {
        const auto pointer = [](nb::handle object) -> CollectiveCalls* { return nb::inst_ptr<Path>(object); };
        kinds_of_paths().push_back({reinterpret_cast<PyTypeObject*>(path.ptr()), pointer});
    }

    // Held while a collective runs or is issued.
    TurnLock& turn() const noexcept { return turn_; }

    // Whether arrays that are cut by rank may be a TensorList.
    virtual bool takes_parts() const noexcept { return false; }

    // Every verb does its collective and returns the result (True if there is none), or declines with None before anything
    // has happened. `timeout`: None for the group's own. `later`: it is only issued, as an IssuedCollective.

    nb::object barrier(nb::handle timeout, bool later) {
        Operation o{Verb::barrier};
        return start(o, timeout, later);
    }

    nb::object broadcast(nb::handle x, nb::handle src, nb::handle timeout, bool later) {
        Operation o{Verb::broadcast};
        o.root = rank_of(src);
        if (o.root < 0 || !look(x, rank() != o.root, o.x)) return nb::none();
        o.bytes = o.x.bytes;
        o.result = x;
        return start(o, timeout, later);
    }

    nb::object all_reduce(nb::handle x, nb::handle op, nb::handle timeout, bool later) {
        Operation o{Verb::all_reduce};
        if (!look(x, true, o.x) || !combine(o, op)) return nb::none();
        o.bytes = o.x.bytes;
        o.result = x;
        return start(o, timeout, later);
    }

    nb::object reduce(nb::handle x, nb::handle dst, nb::handle op, nb::handle timeout, bool later) {
        Operation o{Verb::reduce};
        o.root = rank_of(dst);
        if (o.root < 0 || !look(x, rank() == o.root, o.x) || !combine(o, op)) return nb::none();
        o.bytes = o.x.bytes;
        o.result = x;
        return start(o, timeout, later);
    }

    nb::object all_gather(nb::handle x, nb::handle out, nb::handle timeout, bool later) {
        Operation o{Verb::all_gather};
        if (!look(x, false, o.x) || !look_at_gathered(o, out)) return nb::none();
        o.bytes = o.out.bytes;
        o.result = out;
        return start(o, timeout, later);
    }

    nb::object gather(nb::handle x, nb::handle dst, nb::handle out, nb::handle timeout, bool later) {
        Operation o{Verb::gather};
        o.root = rank_of(dst);
        if (o.root < 0 || !look(x, false, o.x)) return nb::none();
        const bool receives = rank() == o.root;
        if (receives ? !look_at_gathered(o, out) : !out.is_none()) return nb::none();
        o.bytes = o.x.bytes * ranks();
        if (receives) o.result = out;
        return start(o, timeout, later);
    }

    nb::object scatter(nb::handle x, nb::handle src, nb::handle out, nb::handle timeout, bool later) {
        Operation o{Verb::scatter};
        o.root = rank_of(src);
        if (o.root < 0 || !look(out, true, o.out)) return nb::none();
        if (rank() == o.root && (!look_at_cut(x, false, o.x) || !is_cut(o))) return nb::none();
        o.bytes = o.out.bytes * ranks();
        o.result = out;
        return start(o, timeout, later);
    }

    nb::object reduce_scatter(nb::handle x, nb::handle op, nb::handle out, nb::handle timeout, bool later) {
        Operation o{Verb::reduce_scatter};
        if (!look_at_cut(x, false, o.x) || !look(out, true, o.out) || !is_cut(o) || !combine(o, op)) return nb::none();
        o.bytes = o.x.bytes;
        o.result = out;
        return start(o, timeout, later);
    }

    nb::object all_to_all(nb::handle x, nb::handle out, nb::handle timeout, bool later) {
        Operation o{Verb::all_to_all};
        if (!look_at_cut(x, false, o.x) || !look_at_cut(out, true, o.out) || o.x.dtype != o.out.dtype) return nb::none();
        if (!o.x.divides(ranks()) || o.x.bytes != o.out.bytes || !o.x.apart_from(o.out)) return nb::none();
        o.bytes = o.x.bytes;
        o.result = out;
        return start(o, timeout, later);
    }

    // Any of them, by its arguments in order; those that it does not have are ignored.
    nb::object call(Verb verb, const std::array<nb::handle, 3>& arguments, nb::handle timeout, bool later) {
        const auto [first, second, third] = arguments;
        switch (verb) {
            case Verb::barrier: return barrier(timeout, later);
            case Verb::broadcast: return broadcast(first, second, timeout, later);
            case Verb::all_reduce: return all_reduce(first, second, timeout, later);
            case Verb::reduce: return reduce(first, second, third, timeout, later);
            case Verb::all_gather: return all_gather(first, second, timeout, later);
            case Verb::gather: return gather(first, second, third, timeout, later);
            case Verb::scatter: return scatter(first, second, third, timeout, later);
            case Verb::reduce_scatter: return reduce_scatter(first, second, third, timeout, later);
            case Verb::all_to_all: return all_to_all(first, second, timeout, later);
            default: return nb::none();  // those of objects have functions of their own
        }
    }

protected:
    // `kind_of(verb, dtype, op)` is the part of the fingerprint that stays. `describe(x, n)` is what the root of a scatter
    // tells of the n parts of `x`.
    CollectiveCalls(int rank, int ranks, Recorder& recorder, TurnLock& turn, PlainArrays& arrays, nb::object kind_of,
                    nb::object describe, double timeout)
        : recorder_(recorder),
          turn_(turn),
          timeout_ns_(static_cast<std::int64_t>(timeout * 1e9)),
          rank_(rank),
          ranks_(ranks),
          arrays_(arrays),
          kind_of_(std::move(kind_of)),
          describe_(std::move(describe)) {
        for (int i = 0; i < ops; ++i) op_objects_[i] = nb::steal(PyUnicode_InternFromString(op_names[i]));
    }

    // Whether this path can do it at all.
    virtual bool takes(const Operation&) const { return true; }
    // The number of the GPU whose arrays this path takes, too; -1 if it takes none.
    virtual int own_gpu() const noexcept { return -1; }
    // Does it in its turn; false if it is not, or cannot be now.
    virtual bool run(Operation&) = 0;
    // Gives it its number, for later: an IssuedCollective, or None.
    virtual nb::object issue(Operation&) { return nb::none(); }
    // Whether the arrays of all ranks are added in one go, so that no sum of some of them is kept in 16 bits.
    virtual bool adds_at_once() const noexcept { return false; }

    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return ranks_; }

    // `dtype`: as `number_of` says.
    std::uint64_t kind_of(Verb verb, int dtype, int op) {
        const bool gpu = dtype >= on_gpu;
        std::uint64_t& known = kinds_[gpu ? 1 : 0][static_cast<int>(verb)][gpu ? dtype - on_gpu : dtype + 1][op + 1];
        if (known == 0)
            known = nb::cast<std::uint64_t>(in_interpreter(
                [&] { return kind_of_(verb_names[static_cast<int>(verb)], dtype, op >= 0 ? op_names[op] : ""); }));
        return known;
    }

    // An operation's dtype and where the arrays lie, as one number; -1 if there is none.
    static int number_of(const Operation& o) noexcept { return o.on_gpu && o.dtype >= 0 ? on_gpu + o.dtype : o.dtype; }

    // What the root of a scatter tells of the parts of an array; mostly it is like the one before.
    const std::string& words_of(const Array& array) {
        const std::vector<Py_ssize_t> shape(array.lengths.begin(), array.lengths.begin() + array.dims);
        PyTypeObject* const type = Py_TYPE(array.object.ptr());
        const bool is_other = array.dtype != described_ || shape != described_shape_ || array.gpu != described_gpu_;
        if (words_.empty() || is_other || type != described_type_) {
            const nb::object words = in_interpreter([&] {
                if (array.parts == nullptr) return describe_(array.object, ranks());
                return describe_(nb::inst_ptr<TensorList>(array.object)->first(), 1);
            });
            words_ = std::string(nb::cast<nb::bytes>(words).c_str(), nb::len(words));
            described_ = array.dtype;
            described_shape_ = shape;
            described_gpu_ = array.gpu;
            described_type_ = type;
        }
        return words_;
    }

    void give_number(Operation& o) {
        o.sequence = ++recorder_.sequence;
        o.fingerprint = fingerprint_of(o.kind, o.sequence, extent_of(o.x.lengths.data(), o.dims()), o.root < 0 ? 0 : o.root);
    }

    // `place`: where it is on the slate, if it is there already.
    Record& note(const Operation& o, const CallSite& site, const SlateWriter::Place* place = nullptr) {
        Record& record = recorder_.begin_collective(verb_names[static_cast<int>(o.verb)], site);
        record.rank = o.root;
        if (o.op >= 0) record.op = op_names[o.op];
        record.dtype = number_of(o);
        record.dims = o.dims();
        std::copy_n(o.x.lengths.begin(), o.dims(), record.shape.begin());
        record.sequence = o.sequence;
        record.fingerprint = o.fingerprint;
        record.bytes = o.bytes;
        if (place == nullptr)
            recorder_.show(record);
        else
            record.place = *place;
        return record;
    }

    // Does an operation that was looked at, or issues it.
    nb::object start(Operation& o, nb::handle timeout, bool later) {
        if (o.verb != Verb::barrier && o.verb != Verb::scatter && !moves_objects(o.verb)) o.dtype = static_cast<int>(o.x.dtype);
        o.on_gpu = o.x.gpu >= 0 || o.out.gpu >= 0;
        const bool has_both = o.x.object.is_valid() && o.out.object.is_valid();
        if (o.on_gpu && (later || (has_both && o.x.gpu != o.out.gpu))) return nb::none();
        if (!set_time(o, timeout) || !takes(o)) return nb::none();
        o.kind = kind_of(o.verb, number_of(o), o.op);
        if (later) return issue(o);
        if (!run(o)) return nb::none();
        return nb::borrow(o.result.is_valid() ? o.result : nb::handle(Py_True));
    }

    // -1 for what is no rank, or not a plain int: the general way says so, or knows better.
    int rank_of(nb::handle object) const noexcept {
        if (!PyLong_CheckExact(object.ptr())) return -1;
        int overflow = 0;
        const long value = PyLong_AsLongAndOverflow(object.ptr(), &overflow);
        return overflow == 0 && value >= 0 && value < ranks() ? static_cast<int>(value) : -1;
    }

    Recorder& recorder_;
    TurnLock& turn_;

private:
    static constexpr double longest_seconds = 1e9;
    static constexpr int on_gpu = 100;  // ON_GPU in phalanx/_native.py

    struct Kind {
        PyTypeObject* type;
        CollectiveCalls* (*pointer)(nb::handle);
    };
    static std::vector<Kind>& kinds_of_paths() {
        static std::vector<Kind> all;
        return all;
    }

    // False for what is no time, or not a plain number: the general way says so.
    bool set_time(Operation& o, nb::handle timeout) const noexcept {
        o.timeout_ns = timeout_ns_;
        if (timeout.is_none()) return true;
        if (!PyFloat_CheckExact(timeout.ptr()) && !PyLong_CheckExact(timeout.ptr())) return false;
        const double seconds = PyFloat_AsDouble(timeout.ptr());
        if (PyErr_Occurred() != nullptr) PyErr_Clear();  // a number beyond all floats, which is -1 here
        o.timeout_ns = seconds > 0 && seconds < longest_seconds ? static_cast<std::int64_t>(seconds * 1e9) : 0;
        return o.timeout_ns > 0;
    }

    bool look(nb::handle object, bool writable, Array& found) {
        PlainArray plain;
        if (!arrays_.look_further(object, writable, plain, own_gpu() >= 0) || plain.dims > Record::most_dims) return false;
        if (plain.gpu >= 0 && plain.gpu != own_gpu()) return false;
        found.gpu = plain.gpu;
        found.stream = plain.stream;
        found.object = object;
        found.data = plain.data;
        found.bytes = plain.bytes;
        found.dtype = plain_dtypes[plain.number];
        found.items = plain.bytes / item_size(found.dtype);
        found.dims = plain.dims;
        std::copy_n(plain.shape, plain.dims, found.lengths.begin());
        return true;
    }

    // The same for what has one part for each rank: these may lie apart.
    bool look_at_cut(nb::handle object, bool writable, Array& found) {
        static const nb::handle type = nb::type<TensorList>();
        if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != type.ptr()) return look(object, writable, found);
        auto* const list = nb::inst_ptr<TensorList>(object);
        if (!takes_parts() || list->size() != ranks() || !list->are_alike()) return false;
        found.object = object;
        found.parts = list->places.data();
        found.cuts = ranks();
        found.bytes = list->bytes();
        found.dtype = plain_dtypes[list->number];
        found.items = found.bytes / item_size(found.dtype);
        found.dims = 1;
        found.lengths[0] = static_cast<Py_ssize_t>(found.items);
        return true;
    }

    // The array that the parts of all ranks are put together in.
    bool look_at_gathered(Operation& o, nb::handle out) {
        return look_at_cut(out, true, o.out) && o.x.dtype == o.out.dtype && o.x.bytes * ranks() == o.out.bytes &&
               (o.x.apart_from(o.out) || o.x.is_part_of(o.out, rank()));
    }

    // Whether `out` is as long as one of the parts that `x` is cut into.
    bool is_cut(const Operation& o) const noexcept {
        return o.x.dtype == o.out.dtype && o.x.divides(ranks()) && o.x.bytes == o.out.bytes * ranks() &&
               (o.x.apart_from(o.out) || o.out.is_part_of(o.x, rank()));
    }

    // False if there is no such operation for the dtype.
    bool combine(Operation& o, nb::handle op) const {
        const Dtype dtype = o.x.dtype;
        int code = 0;
        while (code < ops && op.ptr() != op_objects_[code].ptr()) ++code;
        if (code == ops || (code == mean && !is_floating(dtype))) return false;
        if (code == mean && dtype == Dtype::float16 && !adds_at_once()) return false;  // see `Reduction.divides_first`
        o.op = code;
        o.how = code == mean ? Combine{dtype, Op::sum, ranks()} : Combine{dtype, static_cast<Op>(code), 1};
        return has_op(o.how.dtype, o.how.op);
    }

    const std::int64_t timeout_ns_;
    const int rank_, ranks_;
    PlainArrays& arrays_;
    nb::object kind_of_, describe_;
    std::string words_;  // of the array that was described last
    Dtype described_ = Dtype::uint8;
    std::vector<Py_ssize_t> described_shape_;
    int described_gpu_ = -1;
    PyTypeObject* described_type_ = nullptr;  // only compared
    std::array<nb::object, ops> op_objects_;
    std::uint64_t kinds_[2][verbs][dtypes + 1][ops + 1] = {};  // on the host, and on a GPU
};

// The verbs, for Python. None is declined as anything else that is not as it should be: the general way says what is wrong.
template <class Path>
void bind_verbs(nb::class_<Path>& path) {
    const auto plain = [] { return nb::arg().none(); };
    const auto timeout = nb::arg("timeout").none() = nb::none();
    const auto later = nb::arg("later") = false;
    CollectiveCalls::add_kind(path);
    path.def_rw("paused", &Path::paused)
        .def("barrier", &Path::barrier, timeout, later)
        .def("broadcast", &Path::broadcast, plain(), plain(), timeout, later)
        .def("all_reduce", &Path::all_reduce, plain(), plain(), timeout, later)
        .def("reduce", &Path::reduce, plain(), plain(), plain(), timeout, later)
        .def("all_gather", &Path::all_gather, plain(), plain(), timeout, later)
        .def("gather", &Path::gather, plain(), plain(), plain(), timeout, later)
        .def("scatter", &Path::scatter, plain(), plain(), plain(), timeout, later)
        .def("reduce_scatter", &Path::reduce_scatter, plain(), plain(), plain(), timeout, later)
        .def("all_to_all", &Path::all_to_all, plain(), plain(), timeout, later);
}

}  // namespace phalanx
