// A contiguous tensor of torch as flat memory, on the CPU or where that is asked for on a GPU, found by the table of C functions that torch offers for this
// (DLPack's exchange API, `Tensor.__dlpack_c_exchange_api__`): a fraction of what an array of NumPy on it costs.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace phalanx {

namespace nb = nanobind;

// A tensor's memory, for as long as the caller holds the tensor.
struct TensorView {
    std::byte* data = nullptr;
    Py_ssize_t count = 0;     // elements
    Py_ssize_t itemsize = 0;
    Py_ssize_t rows = -1;     // the tensor's length along dim 0; -1 for a scalar
    int number = -1;          // of the dtype that the elements lie in memory as, in `phalanx._native.PLAIN`
    bool is_stand_in = false; // that is not the dtype of the tensor, but one of the same size
    bool is_floating = false;
    PyObject* dtype = nullptr;  // the tensor's own, which torch keeps for ever
    int gpu = -1;             // the number of the GPU that it lies on; -1 on the CPU
    void* stream = nullptr;   // that GPU's current one in this thread
    int dims = 0;
    const std::int64_t* shape = nullptr;  // the tensor's own, which changes if it is resized: to be copied at once

    std::size_t bytes() const noexcept { return static_cast<std::size_t>(count * itemsize); }
};

// What `PlainArrays` takes beside NumPy's arrays, and by the buffer protocol everything else that takes an array.
struct FlatTensor : TensorView {
    nb::object tensor;  // owns the memory: an operation may outlive what the caller holds

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
        // By the position in PLAIN; a buffer says of the elements what NumPy does.
        static constexpr const char* formats[] = {"?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d"};
        static std::byte nothing{};
        auto* flat = nb::inst_ptr<FlatTensor>(self);
        if (flat->gpu >= 0) {
            PyErr_SetString(PyExc_BufferError, "the tensor lies on a GPU");
            return -1;
        }
        void* place = flat->data != nullptr ? flat->data : &nothing;
        if (PyBuffer_FillInfo(view, self, place, flat->count * flat->itemsize, 0, flags) != 0) return -1;
        view->itemsize = flat->itemsize;
        if ((flags & PyBUF_FORMAT) != 0) view->format = const_cast<char*>(formats[flat->number]);
        if ((flags & PyBUF_ND) != 0) view->shape = &flat->count;
        if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) view->strides = &flat->itemsize;
        return 0;
    }
};

// Reads tensors. Knows nothing of torch but what it is given.
class TensorReader {
public:
    // `types` are the classes of tensors that nothing special is about. `dtypes` are tuples of: torch's dtype, the position in
    // PLAIN of what it lies in memory as, the bytes of an element, whether that is only a stand-in of its size, whether it
    // has a fraction, and the position of the dtype itself: behind PLAIN for bfloat16, -1 for one that is not known.
    TensorReader(std::vector<nb::object> types, nb::object exchange_api, nb::object is_neg, const nb::list& dtypes)
        : types_(std::move(types)), is_neg_(std::move(is_neg)) {
        const auto* api = static_cast<const Api*>(PyCapsule_GetPointer(exchange_api.ptr(), "dlpack_exchange_api"));
        if (api == nullptr) throw nb::python_error();
        while (api != nullptr && api->major != 1) api = api->older;
        read_ = api == nullptr ? nullptr : api->read;
        current_stream_ = api == nullptr ? nullptr : api->stream;
        for (nb::handle row : dtypes)
            kinds_.push_back({nb::object(row[0]), nb::cast<int>(nb::object(row[1])), nb::cast<int>(nb::object(row[2])),
                              nb::cast<bool>(nb::object(row[3])), nb::cast<bool>(nb::object(row[4])),
                              nb::cast<int>(nb::object(row[5]))});
    }

    // As the other, and keeps the tensor.
    bool look(nb::handle object, FlatTensor& found, bool on_gpu = false) const {
        found.tensor = nb::borrow(object);  // before another thread may take it out of the list that it came from
        if (!look(object, static_cast<TensorView&>(found), on_gpu)) return false;
        found.shape = nullptr;
        return true;
    }

    // False, without an error, for what is no tensor, or one that is not plain, contiguous and on the CPU, or with `on_gpu` on
    // one of CUDA's GPUs. The caller holds the tensor. Other threads may run meanwhile, and perhaps Python's code, but not
    // between the last look at the tensor and the end.
    bool look(nb::handle object, TensorView& found, bool on_gpu = false) const {
        const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
        if (!is_known(type) || read_ == nullptr) return false;
        Tensor tensor;
        if (read_(object.ptr(), &tensor) != 0) {  // sparse, or without memory
            PyErr_Clear();
            return false;
        }
        const Kind* const kind = kind_of(object, tensor);
        if (kind == nullptr || !is_as_it_lies(object)) return false;
        const std::pair was{tensor.code, tensor.bits};
        if (read_(object.ptr(), &tensor) != 0 || std::pair{tensor.code, tensor.bits} != was) {  // given other memory meanwhile
            PyErr_Clear();
            return false;
        }
        if ((tensor.device != cpu && !(on_gpu && tensor.device == cuda)) || tensor.lanes != 1 || tensor.bits != 8 * kind->itemsize)
            return false;
        std::int64_t count = 1;
        for (int i = tensor.dims; i-- > 0;) {
            if (tensor.shape[i] != 1 && tensor.strides != nullptr && tensor.strides[i] != count && !is_empty(tensor)) return false;
            count *= tensor.shape[i];
        }
        if (tensor.data == nullptr && count != 0) return false;
        found.gpu = -1;
        if (tensor.device == cuda) {
            found.gpu = tensor.device_number;
            if (current_stream_ == nullptr || current_stream_(tensor.device, tensor.device_number, &found.stream) != 0) {
                PyErr_Clear();
                return false;
            }
        }
        found.data = static_cast<std::byte*>(tensor.data) + tensor.offset;
        found.count = static_cast<Py_ssize_t>(count);
        found.itemsize = kind->itemsize;
        found.rows = tensor.dims > 0 ? static_cast<Py_ssize_t>(tensor.shape[0]) : -1;
        found.number = kind->number;
        found.is_stand_in = kind->is_stand_in;
        found.is_floating = kind->is_floating;
        if (found.gpu >= 0) {  // where it lies, NumPy cannot look
            if (kind->own_number < 0) return false;
            found.number = kind->own_number;
            found.is_stand_in = false;
        }
        found.dtype = kind->dtype.ptr();
        found.dims = tensor.dims;
        found.shape = tensor.shape;
        return true;
    }

    // Whether this is a tensor and no parameter, and nobody wants its gradient. The first of the types is torch.Tensor.
    bool is_mere(nb::handle object) const {
        return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == types_.front().ptr() &&
               nb::getattr(object, requires_grad_).ptr() == Py_False;
    }

    // Where the elements of tensors lie, whatever they are and however they lie: equal as long as none was given other memory,
    // or another order in it. None if one of them cannot be read.
    nb::object layout(const nb::list& tensors) const {
        std::vector<std::int64_t> found;
        for (nb::handle object : tensors) {
            const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
            Tensor tensor;
            if (!is_known(type) || read_ == nullptr) return nb::none();
            if (read_(object.ptr(), &tensor) != 0) {
                PyErr_Clear();
                return nb::none();
            }
            found.insert(found.end(), {reinterpret_cast<std::int64_t>(tensor.data), static_cast<std::int64_t>(tensor.offset),
                                       tensor.device, tensor.device_number, tensor.code, tensor.bits, tensor.dims});
            for (int i = 0; i < tensor.dims; ++i) found.push_back(tensor.shape[i]);
            for (int i = 0; tensor.strides != nullptr && i < tensor.dims; ++i) found.push_back(tensor.strides[i]);
        }
        return nb::bytes(found.data(), found.size() * sizeof(found[0]));
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
        int (*stream)(int device, std::int32_t device_number, void** found);
    };
    static constexpr std::int32_t cpu = 1, cuda = 2;
    static constexpr std::uint8_t floating = 2;

    bool is_known(const PyObject* type) const noexcept {
        for (const nb::object& one : types_)
            if (one.ptr() == type) return true;
        return false;
    }

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
        nb::object dtype;
        int number;
        int itemsize;
        bool is_stand_in;
        bool is_floating;
        int own_number;
    };

    // DLPack has one name for several dtypes, so torch says which one it is, but for those floats of which there is one of each
    // size. Null for one that is not known here.
    const Kind* kind_of(nb::handle object, const Tensor& tensor) const {
        const bool is_named = tensor.code == floating && tensor.bits <= 64 && tensor.bits >= 16;
        const Kind*& known = named_[tensor.bits / 32];
        if (is_named && known != nullptr && known->itemsize * 8 == tensor.bits) return known;
        const nb::object dtype = nb::getattr(object, dtype_);
        for (const Kind& kind : kinds_)
            if (kind.dtype.ptr() == dtype.ptr()) {
                if (is_named) known = &kind;
                return &kind;
            }
        return nullptr;
    }

    std::vector<nb::object> types_;
    nb::object is_neg_;
    int (*read_)(void*, Tensor*) = nullptr;
    int (*current_stream_)(int, std::int32_t, void**) = nullptr;
    std::vector<Kind> kinds_;
    mutable const Kind* named_[8] = {};  // of 16, 32 and 64 bits, as soon as they were met
    nb::object dtype_ = nb::steal(PyUnicode_InternFromString("dtype"));
    nb::object requires_grad_ = nb::steal(PyUnicode_InternFromString("requires_grad"));
};

}  // namespace phalanx
