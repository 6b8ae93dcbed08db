// A list of tensors, one for each rank, each where it lies: so that a collective need not join them before it, or cut its result
// afterwards.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "flat_tensor.hpp"

namespace phalanx {

namespace nb = nanobind;

struct TensorList {
    std::vector<std::byte*> places;
    std::vector<Py_ssize_t> counts;  // elements of each
    Py_ssize_t itemsize = 0;
    int number = -1;            // as that of a TensorView
    bool is_stand_in = false;
    bool is_floating = false;
    PyObject* dtype = nullptr;
    bool is_target = false;  // the collective writes to them
    nb::object tensors;      // own the memory: a tuple, because the caller may change the list

    // False for what is no list, an empty one, one with a tensor that is not plain or not in the memory of the host, or several
    // dtypes.
    bool look(const TensorReader& reader, nb::handle list) {
        if (!PyList_CheckExact(list.ptr())) return false;
        tensors = nb::steal(PyList_AsTuple(list.ptr()));
        if (!tensors.is_valid()) throw nb::python_error();
        const Py_ssize_t length = NB_TUPLE_GET_SIZE(tensors.ptr());
        places.reserve(length);
        counts.reserve(length);
        for (Py_ssize_t i = 0; i < length; ++i) {
            TensorView view;
            if (!reader.look(NB_TUPLE_GET_ITEM(tensors.ptr(), i), view) || (i > 0 && view.dtype != dtype)) return false;
            if (i == 0) {
                itemsize = view.itemsize;
                number = view.number;
                is_stand_in = view.is_stand_in;
                is_floating = view.is_floating;
                dtype = view.dtype;
            }
            places.push_back(view.data);
            counts.push_back(view.count);
        }
        return length > 0;
    }

    int size() const noexcept { return static_cast<int>(places.size()); }
    std::size_t bytes_of(int i) const noexcept { return static_cast<std::size_t>(counts[i] * itemsize); }
    std::size_t bytes() const noexcept {
        std::size_t sum = 0;
        for (int i = 0; i < size(); ++i) sum += bytes_of(i);
        return sum;
    }

    bool are_alike() const noexcept {
        for (const Py_ssize_t count : counts)
            if (count != counts[0]) return false;
        return true;
    }

    // Whether they lie one after another, as those do that were cut from one tensor.
    bool are_adjacent() const noexcept {
        for (int i = 1; i < size(); ++i)
            if (places[i] != places[i - 1] + bytes_of(i - 1)) return false;
        return true;
    }

    FlatTensor first() const { return flat(places[0], counts[0], tensors); }

    // All of them as one array, where they lie so.
    FlatTensor whole() const { return flat(places[0], static_cast<Py_ssize_t>(bytes()) / itemsize, tensors); }

    // The same in memory of its own: a copy, unless they are to be written to.
    FlatTensor joined() const {
        nb::object memory = nb::steal(PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes())));
        if (!memory.is_valid()) throw nb::python_error();
        auto* at = reinterpret_cast<std::byte*>(PyByteArray_AsString(memory.ptr()));
        FlatTensor made = flat(at, static_cast<Py_ssize_t>(bytes()) / itemsize, std::move(memory));
        for (int i = 0; i < size() && !is_target; at += bytes_of(i++)) copy(at, places[i], bytes_of(i));
        return made;
    }

    // Copies what is in that memory to the tensors.
    void fill(const FlatTensor& values) const noexcept {
        const std::byte* at = values.data;
        for (int i = 0; i < size(); at += bytes_of(i++)) copy(places[i], at, bytes_of(i));
    }

private:
    // An empty tensor need not have an address.
    static void copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
        if (bytes > 0) std::memcpy(to, from, bytes);
    }

    FlatTensor flat(std::byte* data, Py_ssize_t count, nb::object owner) const {
        FlatTensor made;
        made.data = data;
        made.count = count;
        made.itemsize = itemsize;
        made.rows = count;
        made.number = number;
        made.is_stand_in = is_stand_in;
        made.is_floating = is_floating;
        made.dtype = dtype;
        made.dims = 1;
        made.tensor = std::move(owner);
        return made;
    }
};

}  // namespace phalanx
