// Counts what a test has looked at, from any thread, and says what did not hold.
#pragma once

#include <atomic>
#include <cstdio>

inline std::atomic<int> failures{0};
inline std::atomic<int> checks{0};

#define CHECK(condition)                                                        \
    do {                                                                        \
        ++checks;                                                               \
        if (!(condition)) {                                                     \
            ++failures;                                                         \
            std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                       \
    } while (false)
