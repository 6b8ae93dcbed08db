// A C-contiguous NumPy array of plain numbers, looked at without the buffer protocol, which costs more than a message.
//
// The fields lie where numpy/ndarraytypes.h puts them, in NumPy 1 and 2 alike. Before they are used, they are compared
// with what the buffer protocol says of a few arrays; where that differs, no array is ever plain.
//
// A tensor of torch in ordinary memory is as plain (flat_tensor.hpp).
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "flat_tensor.hpp"
#include "gil.hpp"

namespace phalanx {

struct ArrayFields {
    PyObject_HEAD
    std::byte* data;
    int dims;
    Py_ssize_t* shape;
    Py_ssize_t* strides;
    PyObject* base;
    PyObject* dtype;
    int flags;

    static constexpr int contiguous = 0x1;
    static constexpr int writable = 0x400;
};

struct PlainArray {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    int dims = 0;
    const Py_ssize_t* shape = nullptr;
    const std::string* dtype = nullptr;  // as a frame calls it; null for a tensor's, and for bfloat16
    int number = -1;                     // of the dtype, in the list that was given; the next one is bfloat16
    int gpu = -1;                        // the number of the GPU that it lies on; -1 on the CPU
    void* stream = nullptr;              // that GPU's current one in this thread

    bool overlaps(const PlainArray& other) const noexcept { return data < other.data + other.bytes && other.data < data + bytes; }
};

// The dtypes that are plain. NumPy has one object of each; an equal one that somebody has made takes the general way.
class PlainArrays {
public:
    // `dtypes` are pairs of a dtype and its name in a frame; `samples` are arrays to compare with. `make_reader()` makes a
    // TensorReader once the program has imported torch; None until then. `bfloat16()` gives the dtype of that name, which is not
    // NumPy's own.
    PlainArrays(nanobind::handle array_type, nanobind::list dtypes, nanobind::list samples, nanobind::object make_reader,
                nanobind::object bfloat16)
        : array_type_(nanobind::borrow(array_type)), make_reader_(std::move(make_reader)), find_bfloat16_(std::move(bfloat16)) {
        for (nanobind::handle pair : dtypes) {
            const nanobind::object dtype = pair[0];
            dtypes_.push_back({dtype, nanobind::cast<std::string>(nanobind::object(pair[1])),
                               nanobind::cast<std::size_t>(dtype.attr("itemsize"))});
        }
        for (nanobind::handle sample : samples) usable_ = usable_ && agrees(sample);
    }

    // False if the array is not plain.
    bool look(nanobind::handle object, bool write, PlainArray& found) const noexcept {
        if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != array_type_.ptr()) return look_flat(object, found);
        const ArrayFields* const fields = usable_fields(object, write);
        if (fields == nullptr) return false;
        for (std::size_t number = 0; number < dtypes_.size(); ++number) {
            const Known& known = dtypes_[number];
            if (known.dtype.ptr() != fields->dtype) continue;
            found = {fields->data, known.itemsize, fields->dims, fields->shape, &known.name, static_cast<int>(number)};
            for (int i = 0; i < fields->dims; ++i) found.bytes *= static_cast<std::size_t>(fields->shape[i]);
            return true;
        }
        return false;
    }

    // As `look`, but takes bfloat16 and tensors, too, and with `on_gpu` those on a GPU. The shape of a tensor is to be copied at
    // once.
    bool look_further(nanobind::handle object, bool write, PlainArray& found, bool on_gpu = false) {
        if (look(object, write, found)) return true;
        if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == array_type_.ptr()) return look_bfloat16(object, write, found);
        const TensorReader* const reader = reader_for(object);
        TensorView view;
        if (reader == nullptr || !reader->look(object, view, on_gpu)) return false;
        found = {view.data, view.bytes(), view.dims, view.shape, nullptr, view.number, view.gpu, view.stream};
        return true;
    }

    // As `look`, of a tensor in ordinary memory whose dtype is one of NumPy's. The shape is to be copied at once.
    bool look_at_tensor(nanobind::handle object, PlainArray& found) {
        if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == array_type_.ptr()) return false;
        const TensorReader* const reader = reader_for(object);
        TensorView view;
        if (reader == nullptr || !reader->look(object, view) || view.is_stand_in) return false;
        const auto number = static_cast<std::size_t>(view.number);
        if (number >= dtypes_.size()) return false;
        found = {view.data, view.bytes(), view.dims, view.shape, &dtypes_[number].name, view.number};
        return true;
    }

    // As `look_at_tensor`, of one that is no more than its elements: no parameter, nor one whose gradient is wanted.
    bool look_at_mere_tensor(nanobind::handle object, PlainArray& found) {
        const TensorReader* const reader = reader_for(object);
        return reader != nullptr && reader->is_mere(object) && look_at_tensor(object, found);
    }

    // The memory of a tensor that was looked at, with the tensor.
    nanobind::object flat(nanobind::handle tensor) const {
        FlatTensor flat;
        if (!reader_.is_valid() || !nanobind::inst_ptr<TensorReader>(reader_)->look(tensor, flat)) return nanobind::borrow(tensor);
        return nanobind::cast(std::move(flat));
    }

private:
    const ArrayFields* usable_fields(nanobind::handle object, bool write) const noexcept {
        const auto* fields = reinterpret_cast<const ArrayFields*>(object.ptr());
        const int needed = ArrayFields::contiguous | (write ? ArrayFields::writable : 0);
        return usable_ && (fields->flags & needed) == needed ? fields : nullptr;
    }

    bool look_bfloat16(nanobind::handle object, bool write, PlainArray& found) {
        const ArrayFields* const fields = usable_fields(object, write);
        if (fields == nullptr) return false;
        if (!bfloat16_.is_valid()) {  // not looked for before there is one; the stable ABI has no other way to the name of a type
            const nanobind::object name = nanobind::getattr(nanobind::handle(fields->dtype).type(), "__name__");
            if (PyUnicode_CompareWithASCIIString(name.ptr(), "dtype[bfloat16]") != 0) return false;
            bfloat16_ = in_interpreter([&] { return find_bfloat16_(); });
        }
        if (bfloat16_.ptr() != fields->dtype) return false;
        found = {fields->data, 2, fields->dims, fields->shape, nullptr, static_cast<int>(dtypes_.size())};
        for (int i = 0; i < fields->dims; ++i) found.bytes *= static_cast<std::size_t>(fields->shape[i]);
        return true;
    }

    bool look_flat(nanobind::handle object, PlainArray& found) const noexcept {
        static const nanobind::handle type = nanobind::type<FlatTensor>();
        if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != type.ptr()) return false;
        const auto* flat = nanobind::inst_ptr<FlatTensor>(object);
        const auto number = static_cast<std::size_t>(flat->number);
        const std::string* const name = number < dtypes_.size() ? &dtypes_[number].name : nullptr;
        found = {flat->data, flat->bytes(), 1, &flat->count, name, flat->number, flat->gpu, flat->stream};
        return true;
    }

    const TensorReader* reader_for(nanobind::handle object) {
        if (reader_.is_valid()) return nanobind::inst_ptr<TensorReader>(reader_);
        const nanobind::object name = nanobind::getattr(object.type(), "__name__");
        if (PyUnicode_CompareWithASCIIString(name.ptr(), "Tensor") != 0 &&
            PyUnicode_CompareWithASCIIString(name.ptr(), "Parameter") != 0) {
            return nullptr;
        }
        nanobind::object made = in_interpreter([&] { return make_reader_(); });
        if (made.is_none()) return nullptr;
        reader_ = std::move(made);
        return nanobind::inst_ptr<TensorReader>(reader_);
    }

    struct Known {
        nanobind::object dtype;
        std::string name;
        std::size_t itemsize;
    };

    bool agrees(nanobind::handle sample) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(sample.ptr())) != array_type_.ptr()) return false;
        Py_buffer view;
        if (PyObject_GetBuffer(sample.ptr(), &view, PyBUF_STRIDES) != 0) throw nanobind::python_error();
        const auto* fields = reinterpret_cast<const ArrayFields*>(sample.ptr());
        bool same = fields->data == static_cast<std::byte*>(view.buf) && fields->dims == view.ndim &&
                    fields->dtype == sample.attr("dtype").ptr() &&
                    ((fields->flags & ArrayFields::contiguous) != 0) == (PyBuffer_IsContiguous(&view, 'C') != 0) &&
                    ((fields->flags & ArrayFields::writable) == 0) == (view.readonly != 0);
        for (int i = 0; same && i < view.ndim; ++i)
            same = fields->shape[i] == view.shape[i] && fields->strides[i] == view.strides[i];
        PyBuffer_Release(&view);
        return same;
    }

    nanobind::object array_type_, make_reader_, reader_, find_bfloat16_, bfloat16_;
    std::vector<Known> dtypes_;
    bool usable_ = true;
};

}  // namespace phalanx
