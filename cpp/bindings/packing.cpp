// Plain Python objects as MessagePack, in one pass. What is not plain is left to the object codec, in Python
// (src/phalanx/wire/packing.py), which writes the same bytes for what is.

#include "module.hpp"

#include <cmath>
#include <limits>
#include <optional>

#include "phalanx/message_pack.hpp"

namespace nb = nanobind;

namespace {

using phalanx::MessagePackWriter;

class PlainPacker {
public:
    // Longer bytes leave the head, and containers nested deeper are refused: that is the codec's business.
    PlainPacker(std::size_t inline_bytes, int max_depth) : inline_bytes_(inline_bytes), max_depth_(max_depth) {}
    ~PlainPacker() { out_.clear(); }
    PlainPacker(const PlainPacker&) = delete;
    PlainPacker& operator=(const PlainPacker&) = delete;

    // False if the object is not plain, or holds one that is not. `depth`: of the containers around it.
    bool value(PyObject* object, int depth) {
        PyTypeObject* type = Py_TYPE(object);
        if (type == &PyUnicode_Type) return text(object);
        if (type == &PyLong_Type) return integer(object);
        if (type == &PyFloat_Type) return out_.number(PyFloat_AsDouble(object)), true;
        if (type == &PyBytes_Type) return raw(object);
        if (object == Py_None) return out_.nothing(), true;
        if (type == &PyBool_Type) return out_.boolean(object == Py_True), true;
        if (type == &PyList_Type) return list(object, depth);
        if (type == &PyDict_Type) return map(object, depth);
        return false;
    }

    // The list of arguments, which comes as a tuple.
    bool arguments(PyObject* tuple, int depth) {
        const Py_ssize_t size = PyTuple_Size(tuple);
        out_.list(static_cast<std::size_t>(size));
        for (Py_ssize_t i = 0; i < size; ++i)
            if (!value(PyTuple_GetItem(tuple, i), depth + 1)) return false;
        return true;
    }

    MessagePackWriter& out() noexcept { return out_; }

    nb::object bytes() const {
        if (out_.size() > std::numeric_limits<std::uint32_t>::max()) return nb::none();
        return nb::bytes(out_.data(), out_.size());
    }

private:
    bool text(PyObject* object) {
        Py_ssize_t size = 0;
        const char* characters = PyUnicode_AsUTF8AndSize(object, &size);
        if (characters == nullptr) {  // a lone surrogate
            PyErr_Clear();
            return false;
        }
        if (static_cast<std::size_t>(size) > std::numeric_limits<std::uint32_t>::max()) return false;
        out_.text(characters, static_cast<std::size_t>(size));
        return true;
    }

    bool raw(PyObject* object) {
        const auto size = static_cast<std::size_t>(PyBytes_Size(object));
        if (size > inline_bytes_) return false;
        out_.raw(PyBytes_AsString(object), size);
        return true;
    }

    bool integer(PyObject* object) {
        int overflow = 0;
        const long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
        if (overflow == 0) {
            out_.signed_number(number);
            return true;
        }
        if (overflow < 0) return false;
        const unsigned long long large = PyLong_AsUnsignedLongLong(object);
        if (PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            return false;
        }
        out_.unsigned_number(large);
        return true;
    }

    bool list(PyObject* object, int depth) {
        if (depth >= max_depth_) return false;
        const Py_ssize_t size = PyList_Size(object);
        out_.list(static_cast<std::size_t>(size));
        for (Py_ssize_t i = 0; i < size; ++i)
            if (!value(PyList_GetItem(object, i), depth + 1)) return false;
        return true;
    }

    bool map(PyObject* object, int depth) {
        if (depth >= max_depth_) return false;
        out_.map(static_cast<std::size_t>(PyDict_Size(object)));
        PyObject *key = nullptr, *item = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &item) != 0;)
            if (!PyUnicode_CheckExact(key) || !text(key) || !value(item, depth + 1)) return false;
        return true;
    }

    std::size_t inline_bytes_;
    int max_depth_;
    static thread_local MessagePackWriter out_;
};

thread_local MessagePackWriter PlainPacker::out_;

constexpr Py_ssize_t longest_name = 1024;  // as in src/phalanx/rpc/payload.py

nb::object pack_plain(nb::handle object, std::size_t inline_bytes, int max_depth) {
    PlainPacker packer(inline_bytes, max_depth);
    return packer.value(object.ptr(), 0) ? packer.bytes() : nb::none();
}

nb::object pack_call(nb::handle name, std::uint64_t target, nb::handle timeout, nb::tuple args, nb::dict kwargs,
                     std::size_t inline_bytes, int max_depth) {
    if (!PyUnicode_CheckExact(name.ptr()) || !PyFloat_CheckExact(timeout.ptr())) return nb::none();
    const double seconds = PyFloat_AsDouble(timeout.ptr());
    if (!(seconds >= 0) || !std::isfinite(seconds)) return nb::none();
    const Py_ssize_t length = PyUnicode_GetLength(name.ptr());
    if (length < 1 || length > longest_name) return nb::none();
    PlainPacker packer(inline_bytes, max_depth);
    packer.out().list(5);
    if (!packer.value(name.ptr(), 1)) return nb::none();
    packer.out().unsigned_number(target);
    packer.out().number(seconds);
    if (!packer.arguments(args.ptr(), 1) || !packer.value(kwargs.ptr(), 1)) return nb::none();
    return packer.bytes();
}

}  // namespace

void phalanx::bind_packing(nb::module_& m) {
    m.def("pack_plain", &pack_plain, nb::arg("value").none(), nb::arg("inline_bytes"), nb::arg("max_depth"),
          "An object as MessagePack; None if it is not plain.");
    m.def("pack_call", &pack_call, nb::arg("name").none(), nb::arg("target"), nb::arg("seconds"), nb::arg("args"), nb::arg("kwargs"),
          nb::arg("inline_bytes"), nb::arg("max_depth"), "A remote call as MessagePack; None if it is not plain.");
}
