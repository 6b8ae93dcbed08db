// The memory of a contiguous CPU tensor of torch, found by the table of C functions that torch offers for this (DLPack's
// exchange API, `Tensor.__dlpack_c_exchange_api__`): a fraction of what an array of NumPy on it costs.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace phalanx {

namespace nb = nanobind;

struct TensorView {
    std::byte* data = nullptr;
    Py_ssize_t count = 0;  // elements
    Py_ssize_t itemsize = 0;
    int dims = 0;
    const std::int64_t* shape = nullptr;  // the tensor's own: to be copied at once
    int number = -1;           // of the dtype that the elements lie in memory as, in `phalanx._native.PLAIN`
    bool is_stand_in = false;  // that is not the dtype of the tensor, but one of the same size
    int code = -1, bits = 0;   // DLPack's of the tensor's own dtype

    static constexpr int bfloat = 4;  // DLPack's code

    std::size_t bytes() const noexcept { return static_cast<std::size_t>(count * itemsize); }
};

// Reads tensors. Knows nothing of torch but what it is given.
class TensorReader {
public:
    // `types` are the classes of tensors that nothing special is about. `dtypes` are rows of: DLPack's code of a dtype,
    // its bits, the position in PLAIN of what it lies in memory as, and whether that is only a stand-in of its size.
    TensorReader(std::vector<nb::object> types, nb::object exchange_api, nb::object is_neg,
                 std::vector<std::array<int, 4>> dtypes)
        : types_(std::move(types)), is_neg_(std::move(is_neg)) {
        const auto* api = static_cast<const Api*>(PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
        if (api == nullptr) throw nb::python_error();
        while (api != nullptr && api->major != 1) api = api->older;
        read_ = api == nullptr ? nullptr : api->read;
        for (const auto& [code, bits, number, stand_in] : dtypes)
            kinds_.at(static_cast<std::size_t>(code)).at(static_cast<std::size_t>(bits / 8)) = {number, stand_in != 0};
    }

    // False, without an error, for what is no tensor, or one that is not plain, contiguous and on the CPU.
    bool look(nb::handle object, TensorView& found) const {
        const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
        bool known = false;
        for (const nb::object& one : types_) known = known || one.ptr() == type;
        if (!known || read_ == nullptr) return false;
        Tensor tensor;
        if (read_(object.ptr(), &tensor) != 0) {  // sparse, or without memory
            PyErr_Clear();
            return false;
        }
        if (tensor.device != cpu || tensor.lanes != 1) return false;
        if (tensor.code >= codes || tensor.bits > most_bits || tensor.bits % 8 != 0) return false;
        const Kind kind = kinds_[tensor.code][tensor.bits / 8];
        if (kind.number < 0) return false;
        std::int64_t count = 1;
        for (int i = tensor.dims; i-- > 0;) {
            if (tensor.shape[i] != 1 && tensor.strides != nullptr && tensor.strides[i] != count && !is_empty(tensor)) return false;
            count *= tensor.shape[i];
        }
        if (tensor.data == nullptr && count != 0) return false;
        found.data = static_cast<std::byte*>(tensor.data) + tensor.offset;
        found.count = static_cast<Py_ssize_t>(count);
        found.itemsize = tensor.bits / 8;
        found.dims = tensor.dims;
        found.shape = tensor.shape;
        found.number = kind.number;
        found.is_stand_in = kind.is_stand_in;
        found.code = tensor.code;
        found.bits = tensor.bits;
        return is_as_it_lies(object);
    }

private:
    // As dlpack.h has them.
    struct Tensor {
        void* data;
        std::int32_t device, device_number;
        std::int32_t dims;
        std::uint8_t code, bits;
        std::uint16_t lanes;
        std::int64_t* shape;
        std::int64_t* strides;
        std::uint64_t offset;
    };
    struct Api {
        std::uint32_t major, minor;
        const Api* older;
        void *allocate, *own, *make;
        int (*read)(void* tensor, Tensor* found);
        void* stream;
    };
    static constexpr std::int32_t cpu = 1;
    static constexpr std::size_t codes = 18;
    static constexpr std::size_t most_bits = 64;

    static bool is_empty(const Tensor& tensor) noexcept {
        for (int i = 0; i < tensor.dims; ++i)
            if (tensor.shape[i] == 0) return true;
        return false;
    }

    // A tensor may stand for the negative of what lies in memory, which DLPack does not say.
    bool is_as_it_lies(nb::handle object) const {
        PyObject* const argument = object.ptr();
        const nb::object negative = nb::steal(PyObject_Vectorcall(is_neg_.ptr(), &argument, 1, nullptr));
        if (!negative.is_valid()) throw nb::python_error();
        return negative.ptr() == Py_False;
    }

    struct Kind {
        int number = -1;
        bool is_stand_in = false;
    };

    std::vector<nb::object> types_;
    nb::object is_neg_;
    int (*read_)(void*, Tensor*) = nullptr;
    std::array<std::array<Kind, most_bits / 8 + 1>, codes> kinds_{};
};

}  // namespace phalanx
