// The functions of the CUDA driver that the core calls: one table of addresses, which Python fills in from libcuda.so.1
// (phalanx/cuda/driver.py), or a test from functions of its own. No header of CUDA is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace phalanx::cuda {

using Address = std::uint64_t;  // in the memory of a GPU

// By which another process opens memory of this one.
struct Handle {
    unsigned char bytes[64];
};

// CUDA_MEMCPY2D.
struct Copy2D {
    struct Side {
        std::size_t x = 0, y = 0;
        unsigned type = 0;
        const void* host = nullptr;
        Address device = 0;
        void* array = nullptr;
        std::size_t pitch = 0;
    };
    Side from{}, to{};
    std::size_t width = 0, height = 0;
};

// All return 0, or an error's number. Streams, events, contexts and kernels are pointers that only the driver looks into.
#define PHALANX_CUDA_FUNCTIONS(X)                                                                                     \
    X(cuCtxGetCurrent, void**)                                                                                        \
    X(cuCtxPushCurrent_v2, void*)                                                                                     \
    X(cuCtxPopCurrent_v2, void**)                                                                                     \
    X(cuPointerGetAttribute, void*, int, Address)                                                                     \
    X(cuPointerGetAttributes, unsigned, int*, void**, Address)                                                        \
    X(cuMemAlloc_v2, Address*, std::size_t)                                                                           \
    X(cuMemFree_v2, Address)                                                                                          \
    X(cuMemHostRegister_v2, void*, std::size_t, unsigned)                                                             \
    X(cuMemHostUnregister, void*)                                                                                     \
    X(cuMemcpyDtoHAsync_v2, void*, Address, std::size_t, void*)                                                       \
    X(cuMemcpyHtoDAsync_v2, Address, const void*, std::size_t, void*)                                                 \
    X(cuMemcpy2DAsync_v2, const Copy2D*, void*)                                                                       \
    X(cuMemcpyDtoDAsync_v2, Address, Address, std::size_t, void*)                                                     \
    X(cuStreamQuery, void*)                                                                                           \
    X(cuStreamIsCapturing, void*, int*)                                                                               \
    X(cuEventRecord, void*, void*)                                                                                    \
    X(cuEventQuery, void*)                                                                                            \
    X(cuIpcGetMemHandle, Handle*, Address)                                                                            \
    X(cuIpcOpenMemHandle_v2, Address*, Handle, unsigned)                                                              \
    X(cuIpcCloseMemHandle, Address)                                                                                   \
    X(cuLaunchKernel, void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**)

struct Driver {
#define PHALANX_FIELD(name, ...) int (*name)(__VA_ARGS__) = nullptr;
    PHALANX_CUDA_FUNCTIONS(PHALANX_FIELD)
#undef PHALANX_FIELD

    static std::vector<std::string> names() {
        return {
#define PHALANX_NAME(name, ...) #name,
            PHALANX_CUDA_FUNCTIONS(PHALANX_NAME)
#undef PHALANX_NAME
        };
    }

    // As many addresses as there are names, in that order.
    explicit Driver(const std::vector<std::uintptr_t>& addresses) {
        if (addresses.size() != names().size()) throw std::invalid_argument("not all of the driver's functions");
        auto next = addresses.begin();
#define PHALANX_SET(name, ...) name = reinterpret_cast<int (*)(__VA_ARGS__)>(*next++);
        PHALANX_CUDA_FUNCTIONS(PHALANX_SET)
#undef PHALANX_SET
    }
};

// A function of the driver failed.
class Error : public std::runtime_error {
public:
    Error(const char* function, int code) : std::runtime_error(function), code(code) {}
    int code;
};

inline void check(const char* function, int code) {
    if (code != 0) throw Error(function, code);
}

}  // namespace phalanx::cuda
