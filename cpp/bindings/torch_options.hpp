// The options of a call of torch.distributed: read where they lie in memory if that is known, else asked for by their names.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "interned.hpp"

namespace phalanx {

namespace nb = nanobind;

struct CallOptions {
    bool later = false;  // the call must return before the operation is done
    nb::object op;       // Phalanx's name of the reduction
    nb::object root;     // an int
};

// Where the fields of an options object lie (phalanx.torch_backend.option_fields). `holder`: in the object, the address of the
// fields, from which the others count; -1 if nothing is known of them.
struct OptionPlaces {
    int holder = -1, later = -1, timeout = -1, op = -1, root = -1;
};

// One of torch's classes of options: what it has beside asyncOp and timeout.
struct OptionsKind {
    OptionsKind() = default;
    OptionsKind(nb::object type, bool has_op, bool has_root, const std::vector<int>& found)
        : type(std::move(type)), has_op(has_op), has_root(has_root) {
        if (found.size() == 5) places = {found[0], found[1], found[2], found[3], found[4]};
    }

    nb::object type;
    bool has_op = false;
    bool has_root = false;
    OptionPlaces places;
};

// Reads options. Knows nothing of torch but the names of the fields, and what it is given.
class OptionsReader {
public:
    // `unset` is the timeout of a call that has none of its own. `reductions` are pairs of what `hash` says of a reduction of
    // torch, which is its number, and Phalanx's name of it.
    OptionsReader(nb::object unset, const nb::list& reductions) : unset_(std::move(unset)) {
        for (nb::handle pair : reductions) {
            nb::object name = pair[1];
            PyObject* text = name.release().ptr();
            PyUnicode_InternInPlace(&text);  // the fast path knows a reduction by the identity of its name
            reductions_.push_back({nb::cast<Py_hash_t>(nb::object(pair[0])), nb::steal(text)});
        }
    }

    // False for what are no such options, and for a call that has its own timeout, or a reduction that is not known here.
    bool read(const OptionsKind& kind, nb::handle options, CallOptions& found) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(options.ptr())) != kind.type.ptr()) return false;
        if (kind.places.holder >= 0) return read_in_place(kind, options, found);
        const nb::object timeout = nb::getattr(options, timeout_);
        const int is_unset = PyObject_RichCompareBool(timeout.ptr(), unset_.ptr(), Py_EQ);
        if (is_unset < 0) throw nb::python_error();
        if (is_unset == 0) return false;
        found.later = nb::getattr(options, async_).ptr() != Py_False;
        if (kind.has_root) found.root = nb::getattr(options, root_);
        if (!kind.has_op) return true;
        const Py_hash_t number = PyObject_Hash(nb::object(nb::getattr(options, op_)).ptr());
        if (number == -1) throw nb::python_error();
        found.op = reduction(number);
        return found.op.is_valid();
    }

private:
    static constexpr std::int64_t unset_ms = -1;  // torch's kUnsetTimeout

    template <class Value>
    static Value value_at(const std::byte* place) noexcept {
        Value value;
        std::memcpy(&value, place, sizeof value);
        return value;
    }

    bool read_in_place(const OptionsKind& kind, nb::handle options, CallOptions& found) const {
        const OptionPlaces& places = kind.places;
        const auto* object = reinterpret_cast<const std::byte*>(options.ptr());
        const auto* fields = value_at<const std::byte*>(object + places.holder);
        if (fields == nullptr || value_at<std::int64_t>(fields + places.timeout) != unset_ms) return false;
        found.later = value_at<std::uint8_t>(fields + places.later) != 0;
        if (kind.has_root) found.root = nb::steal(PyLong_FromLongLong(value_at<std::int64_t>(fields + places.root)));
        if (!kind.has_op) return true;
        found.op = reduction(value_at<std::uint8_t>(fields + places.op));
        return found.op.is_valid();
    }

    nb::object reduction(Py_hash_t number) const {
        for (const auto& [known, name] : reductions_)
            if (known == number) return name;
        return {};
    }

    nb::object unset_;
    std::vector<std::pair<Py_hash_t, nb::object>> reductions_;
    nb::str timeout_ = interned("timeout"), async_ = interned("asyncOp"), op_ = interned("reduceOp"), root_ = interned("rootRank");
};

}  // namespace phalanx
