// What the fast paths of collectives have in common: they look at a call on plain arrays, and note it in the journal.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "gil.hpp"
#include "phalanx/collectives.hpp"
#include "phalanx/fingerprint.hpp"
#include "plain_array.hpp"
#include "recorder.hpp"
#include "turn_lock.hpp"

namespace phalanx {

namespace nb = nanobind;

enum class Verb : int { barrier, broadcast, all_reduce, reduce, all_gather, reduce_scatter, all_to_all, gather, scatter };
inline constexpr const char* verb_names[] = {"barrier",        "broadcast",  "all_reduce", "reduce", "all_gather",
                                             "reduce_scatter", "all_to_all", "gather",     "scatter"};
inline constexpr int verbs = 9;

// As Dtype and Op in reduce.hpp; a mean is a sum and a division.
constexpr int dtypes = 15;
inline constexpr const char* op_names[] = {"sum", "prod", "min", "max", "band", "bor", "bxor", "mean"};
constexpr int ops = 8;
constexpr int mean = 7;

// In the order of `phalanx._native.PLAIN`.
inline constexpr Dtype plain_dtypes[] = {Dtype::boolean, Dtype::int8,    Dtype::uint8,   Dtype::int16,     Dtype::uint16,   Dtype::int32,
                                  Dtype::uint32,  Dtype::int64,   Dtype::uint64,  Dtype::int64,     Dtype::uint64,   Dtype::float16,
                                  Dtype::float32, Dtype::float64, Dtype::complex64, Dtype::complex128};

// The shape of an array, which must be the same on all ranks.
struct Shape {
    int dims = 0;
    const Py_ssize_t* lengths = nullptr;
};

// An array that the fast path can take.
struct Array {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t items = 0;
    Shape shape;
    Py_ssize_t rows = -1;  // -1 for a scalar
    Dtype dtype = Dtype::uint8;

    bool divides(int parts) const noexcept { return rows >= 0 && rows % parts == 0; }
    bool apart_from(const Array& other) const noexcept {
        return data + bytes <= other.data || other.data + other.bytes <= data;
    }
    // Whether this is one of the parts of the whole, which all have this length.
    bool is_part_of(const Array& whole, int part) const noexcept {
        return data == whole.data + static_cast<std::size_t>(part) * bytes;
    }
};

class CollectiveCalls {
public:
    int paused = 0;  // operations under way in another thread, which come first

protected:
    // `kind_of(verb, dtype, op)` is the part of the fingerprint that stays.
    CollectiveCalls(int rank, int ranks, Recorder& recorder, TurnLock& turn, const PlainArrays& arrays, nb::object kind_of,
                    double timeout)
        : recorder_(recorder),
          turn_(turn),
          timeout_ns_(static_cast<std::int64_t>(timeout * 1e9)),
          rank_(rank),
          ranks_(ranks),
          arrays_(arrays),
          kind_of_(std::move(kind_of)) {
        for (int i = 0; i < ops; ++i) op_objects_[i] = nb::steal(PyUnicode_InternFromString(op_names[i]));
    }

    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return ranks_; }

    // What an operation is: the same on all ranks.
    struct What {
        Verb verb;
        int root;   // -1: none
        int dtype;  // -1: none
        int op;     // -1: none
        Shape shape;
        std::size_t bytes;
    };

    // -1 for what is no rank, or not a plain int: the general way says so, or knows better.
    int rank_of(nb::handle object) const noexcept {
        if (!PyLong_CheckExact(object.ptr())) return -1;
        int overflow = 0;
        const long value = PyLong_AsLongAndOverflow(object.ptr(), &overflow);
        return overflow == 0 && value >= 0 && value < ranks() ? static_cast<int>(value) : -1;
    }

    bool look(nb::handle object, bool writable, Array& found) const {
        PlainArray plain;
        if (!arrays_.look(object, writable, plain) || plain.dims > Record::most_dims) return false;
        found.data = plain.data;
        found.bytes = plain.bytes;
        found.dtype = plain_dtypes[plain.number];
        found.items = plain.bytes / item_size(found.dtype);
        found.shape = {plain.dims, plain.shape};
        found.rows = plain.dims > 0 ? plain.shape[0] : -1;
        return true;
    }

    // The position in `op_names`; -1 if there is no such operation for the dtype.
    int combine(Dtype dtype, nb::handle op, Combine& how) const {
        int code = 0;
        while (code < ops && op.ptr() != op_objects_[code].ptr()) ++code;
        if (code == ops || (code == mean && !is_floating(dtype))) return -1;
        how = code == mean ? Combine{dtype, Op::sum, ranks()} : Combine{dtype, static_cast<Op>(code), 1};
        return has_op(how.dtype, how.op) ? code : -1;
    }

    std::uint64_t kind_of(Verb verb, int dtype, int op) {
        std::uint64_t& known = kinds_[static_cast<int>(verb)][dtype + 1][op + 1];
        if (known == 0)
            known = nb::cast<std::uint64_t>(in_interpreter(
                [&] { return kind_of_(verb_names[static_cast<int>(verb)], dtype, op >= 0 ? op_names[op] : ""); }));
        return known;
    }

    Record& note(const What& what, std::uint64_t sequence, std::uint64_t fingerprint) {
        Record& record = recorder_.begin(verb_names[static_cast<int>(what.verb)]);
        record.rank = what.root;
        if (what.op >= 0) record.op = op_names[what.op];
        record.dtype = what.dtype;
        record.dims = what.shape.dims;
        std::copy_n(what.shape.lengths, what.shape.dims, record.shape.begin());
        record.sequence = sequence;
        record.fingerprint = fingerprint;
        return record;
    }

    static std::uint64_t fingerprint_for(std::uint64_t kind, std::uint64_t sequence, const What& what) noexcept {
        return fingerprint_of(kind, sequence, extent_of(what.shape.lengths, what.shape.dims), what.root < 0 ? 0 : what.root);
    }

    Recorder& recorder_;
    TurnLock& turn_;
    const std::int64_t timeout_ns_;

private:
    const int rank_, ranks_;
    const PlainArrays& arrays_;
    nb::object kind_of_;
    std::array<nb::object, ops> op_objects_;
    std::uint64_t kinds_[verbs][dtypes + 1][ops + 1] = {};
};

}  // namespace phalanx
