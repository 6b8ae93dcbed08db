// Plain Python objects as MessagePack, in one pass. What is not plain is left to the object codec, in Python
// (src/phalanx/wire/packing.py), which writes the same bytes for what is; but short arrays in the head, which remote calls
// have, are written only here (src/phalanx/wire/near_arrays.py).

#include "module.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "buffer.hpp"
#include "phalanx/message_pack.hpp"
#include "plain_array.hpp"

namespace nb = nanobind;
using namespace phalanx;

namespace {

// What may be in a head.
struct HeadRules {
    std::size_t inline_bytes;     // longer bytes leave the head
    std::size_t inline_in_short;  // but not up to here, if all of the head is no longer than this:
    std::size_t longest_short;
    std::uint8_t array_code = 0;  // of the extension that an array is,
    std::uint8_t tensor_code = 0;  // and that a tensor of torch is
    PlainArrays* arrays = nullptr;  // which of them may be there, as long as `inline_in_short` at most; null: none
};

class PlainPacker {
public:
    // Containers nested deeper are refused: that is the codec's business.
    PlainPacker(const HeadRules& rules, int max_depth)
        : rules_(rules), max_depth_(max_depth), out_(std::exchange(spare_, {})) {}
    ~PlainPacker() {
        out_.clear();
        spare_ = std::move(out_);
    }
    PlainPacker(const PlainPacker&) = delete;
    PlainPacker& operator=(const PlainPacker&) = delete;

    // False if the object is not plain, or holds one that is not. `depth`: of the containers around it. To look at a tensor lets
    // other threads run, and perhaps Python's code: they may change each container meanwhile. Then it is the codec's business.
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
        return rules_.arrays != nullptr && array(object);
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
        if (out_.size() > (must_be_short_ ? rules_.longest_short : std::numeric_limits<std::uint32_t>::max())) return nb::none();
        return nb::bytes(out_.data(), out_.size());
    }

private:
    // Whether so many bytes may be here, although they belong into a short head only.
    bool fits_in_short(std::size_t size) noexcept {
        must_be_short_ = true;
        return size <= rules_.inline_in_short && out_.size() + size <= rules_.longest_short;
    }

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
        if (size > rules_.inline_bytes && !fits_in_short(size)) return false;
        out_.raw(PyBytes_AsString(object), size);
        return true;
    }

    // In an extension: the length of the words for it, the words, and what it holds.
    bool array(PyObject* object) {
        PlainArray found;
        std::uint8_t code = rules_.array_code;
        if (!rules_.arrays->look(object, false, found)) {
            if (!rules_.arrays->look_at_mere_tensor(object, found)) return false;
            code = rules_.tensor_code;
        }
        if (found.dtype == nullptr || found.bytes == 0 || !fits_in_short(found.bytes)) return false;
        words_.clear();
        words_.list(4);
        words_.unsigned_number(found.bytes);
        words_.list(static_cast<std::size_t>(found.dims));
        for (int i = 0; i < found.dims; ++i) words_.unsigned_number(static_cast<std::uint64_t>(found.shape[i]));
        words_.text(found.dtype->data(), found.dtype->size());
        words_.boolean(false);  // not in Fortran's order
        if (words_.size() > 0xff) return false;
        out_.extension(code, 1 + words_.size() + found.bytes);
        out_.put(static_cast<std::uint8_t>(words_.size()));
        out_.append(words_.data(), words_.size());
        out_.append(reinterpret_cast<const char*>(found.data), found.bytes);
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
        for (Py_ssize_t i = 0; i < size; ++i) {
            const nb::object item = nb::borrow(PyList_GetItem(object, i));
            if (!value(item.ptr(), depth + 1) || PyList_Size(object) != size) return false;
        }
        return true;
    }

    bool map(PyObject* object, int depth) {
        if (depth >= max_depth_) return false;
        nb::object copy;
        if (rules_.arrays != nullptr && PyDict_Size(object) > 0) {
            copy = nb::steal(PyDict_Copy(object));
            if (!copy.is_valid()) throw nb::python_error();
            object = copy.ptr();
        }
        out_.map(static_cast<std::size_t>(PyDict_Size(object)));
        PyObject *key = nullptr, *item = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &item) != 0;)
            if (!PyUnicode_CheckExact(key) || !text(key) || !value(item, depth + 1)) return false;
        return true;
    }

    const HeadRules& rules_;
    int max_depth_;
    bool must_be_short_ = false;
    MessagePackWriter out_, words_;
    // The memory of the last message of this thread, but for one that is packed while another is: to look at the first tensor
    // of a program runs Python.
    static thread_local MessagePackWriter spare_;
};

thread_local MessagePackWriter PlainPacker::spare_;

constexpr Py_ssize_t longest_name = 1024;  // as in src/phalanx/rpc/payload.py

class HeadPacker {
public:
    explicit HeadPacker(const HeadRules& rules) : rules_(rules) {}

    nb::object value(nb::handle object, int max_depth) const {
        PlainPacker packer(rules_, max_depth);
        return packer.value(object.ptr(), 0) ? packer.bytes() : nb::none();
    }

    nb::object call(nb::handle name, std::uint64_t target, nb::handle timeout, nb::tuple args, nb::dict kwargs, int max_depth) const {
        if (!PyUnicode_CheckExact(name.ptr()) || !PyFloat_CheckExact(timeout.ptr())) return nb::none();
        const double seconds = PyFloat_AsDouble(timeout.ptr());
        if (!(seconds >= 0) || !std::isfinite(seconds)) return nb::none();
        const Py_ssize_t length = PyUnicode_GetLength(name.ptr());
        if (length < 1 || length > longest_name) return nb::none();
        PlainPacker packer(rules_, max_depth);
        packer.out().list(5);
        if (!packer.value(name.ptr(), 1)) return nb::none();
        packer.out().unsigned_number(target);
        packer.out().number(seconds);
        if (!packer.arguments(args.ptr(), 1) || !packer.value(kwargs.ptr(), 1)) return nb::none();
        return packer.bytes();
    }

private:
    HeadRules rules_;
};

// Reads the arrays that such a packer has written; called by msgspec, with the code of an extension and its bytes.
class HeadArrays {
public:
    // `read_words(bytes)` gives bytes, shape and dtype (None if the words are wrong), and `empty(count)` memory for so many
    // bytes. What an array holds begins at a multiple of `align` there. `as_tensor(array)` makes a tensor of it.
    HeadArrays(std::uint8_t array_code, std::uint8_t tensor_code, std::size_t align, nb::object array_type, nb::object empty,
               nb::object read_words, nb::object as_tensor)
        : array_code_(array_code),
          tensor_code_(tensor_code),
          align_(align),
          array_type_(std::move(array_type)),
          empty_(std::move(empty)),
          read_words_(std::move(read_words)),
          as_tensor_(std::move(as_tensor)) {}

    nb::object read(int code, nb::handle data) {
        if (code != array_code_ && code != tensor_code_) throw nb::value_error("an extension that only the general way reads");
        const Buffer message(data, PyBUF_SIMPLE);
        const auto* bytes = reinterpret_cast<const char*>(message.data());
        const std::size_t begin = message.bytes() == 0 ? 1 : 1 + static_cast<std::uint8_t>(bytes[0]);
        if (begin > message.bytes()) throw malformed();
        const Known known = look_up({bytes + 1, begin - 1});
        if (message.bytes() - begin != known.bytes) throw malformed();
        const auto may_be = [](char byte) { return byte == 0 || byte == 1; };
        if (known.of_truth && !std::all_of(bytes + begin, bytes + message.bytes(), may_be)) throw malformed();
        nb::object memory = empty_(known.bytes + align_);
        std::size_t start = 0;
        {
            const Buffer room(memory, PyBUF_WRITABLE);
            if (room.bytes() < known.bytes + align_) throw malformed();
            start = (align_ - reinterpret_cast<std::uintptr_t>(room.data()) % align_) % align_;
            std::memcpy(room.data() + start, bytes + begin, known.bytes);
        }
        nb::object array = array_type_(known.shape, known.dtype, memory, start);
        return code == tensor_code_ ? as_tensor_(array) : array;
    }

private:
    static constexpr std::size_t most_known = 256;

    struct Known {
        std::size_t bytes;
        nb::object shape, dtype;
        bool of_truth;  // not every byte is a value of such an array
    };

    static nb::builtin_exception malformed() { return nb::value_error("an array in a head is malformed"); }

    // A copy: what is called after this may let another thread come here.
    Known look_up(std::string_view words) {
        if (const auto found = known_.find(words); found != known_.end()) return found->second;
        const nb::object read = read_words_(nb::bytes(words.data(), words.size()));
        if (nb::object(read[2]).is_none()) throw malformed();
        Known known{nb::cast<std::size_t>(read[0]), read[1], read[2], nb::cast<std::string>(read[2].attr("char")) == "?"};
        if (known_.size() == most_known) known_.clear();
        return known_.emplace(words, std::move(known)).first->second;
    }

    std::uint8_t array_code_, tensor_code_;
    std::size_t align_;
    nb::object array_type_, empty_, read_words_, as_tensor_;
    std::map<std::string, Known, std::less<>> known_;
};

}  // namespace

void phalanx::bind_packing(nb::module_& m) {
    nb::class_<HeadPacker>(m, "HeadPacker", "Plain objects, short arrays and tensors as MessagePack.")
        .def(
            "__init__",
            [](HeadPacker* self, std::size_t inline_bytes, std::size_t inline_in_short, std::size_t longest_short, std::uint8_t array_code,
               std::uint8_t tensor_code, PlainArrays* arrays) {
                new (self) HeadPacker({inline_bytes, inline_in_short, longest_short, array_code, tensor_code, arrays});
            },
            nb::arg("inline_bytes"), nb::arg("inline_in_short"), nb::arg("longest_short"), nb::arg("array_code") = 0,
            nb::arg("tensor_code") = 0, nb::arg("arrays") = nb::none(), nb::keep_alive<1, 7>())
        .def("value", &HeadPacker::value, nb::arg("value").none(), nb::arg("max_depth"), "None if it is not plain, or too long.")
        .def("call", &HeadPacker::call, nb::arg("name").none(), nb::arg("target"), nb::arg("seconds"), nb::arg("args"),
             nb::arg("kwargs"), nb::arg("max_depth"), "A remote call; None if it is not plain, or too long.");
    nb::class_<HeadArrays>(m, "HeadArrays", "Reads the arrays that a HeadPacker has written.")
        .def(nb::init<std::uint8_t, std::uint8_t, std::size_t, nb::object, nb::object, nb::object, nb::object>(), nb::arg("array_code"),
             nb::arg("tensor_code"), nb::arg("align"), nb::arg("array_type"), nb::arg("empty"), nb::arg("read_words"),
             nb::arg("as_tensor"))
        .def("read", &HeadArrays::read, nb::arg("code"), nb::arg("data"), "An array or a tensor with memory of its own; ValueError if it is none.");
}
