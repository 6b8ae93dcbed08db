// The options of a call of torch.distributed, asked for by their names.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace phalanx {

namespace nb = nanobind;

struct CallOptions {
    bool later = false;  // the call must return before the operation is done
    nb::object op;       // Phalanx's name of the reduction
    nb::object root;     // an int
};

// One of torch's classes of options: what it has beside asyncOp and timeout.
struct OptionsKind {
    nb::object type;
    bool has_op = false;
    bool has_root = false;
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
        const nb::object timeout = nb::getattr(options, timeout_);
        const int is_unset = PyObject_RichCompareBool(timeout.ptr(), unset_.ptr(), Py_EQ);
        if (is_unset < 0) throw nb::python_error();
        if (is_unset == 0) return false;
        found.later = nb::getattr(options, async_).ptr() != Py_False;
        if (kind.has_root) found.root = nb::getattr(options, root_);
        if (kind.has_op) found.op = reduction(nb::getattr(options, op_));
        return !kind.has_op || found.op.is_valid();
    }

private:
    nb::object reduction(const nb::object& op) const {
        const Py_hash_t number = PyObject_Hash(op.ptr());
        if (number == -1) throw nb::python_error();
        for (const auto& [known, name] : reductions_)
            if (known == number) return name;
        return {};
    }

    static nb::object interned(const char* text) { return nb::steal(PyUnicode_InternFromString(text)); }

    nb::object unset_;
    std::vector<std::pair<Py_hash_t, nb::object>> reductions_;
    nb::object timeout_ = interned("timeout"), async_ = interned("asyncOp"), op_ = interned("reduceOp"),
               root_ = interned("rootRank");
};

}  // namespace phalanx
