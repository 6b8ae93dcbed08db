// The messages that the fast path through MPI has begun to move, by the rank at their other end.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <memory>

#include "message_calls.hpp"
#include "mpi_wire.hpp"

namespace phalanx {

struct MpiTransfer {
    MessageCalls::Message message;
    std::int64_t deadline_ns = 0;
    std::int64_t until_ns = 0;             // the general way goes on with it
    std::uint64_t number = 0;              // its sender's; 0 if it has no body
    std::unique_ptr<MpiRequest> moving{};  // what MPI has of it: its body, or the head that a short one travels in
    bool ended = false;

    void set_time() {
        deadline_ns = message.began + message.timeout_ns;
        until_ns = message.began + message.longest_ns;
    }
    bool look() { return ended = ended || (moving != nullptr && moving->test()); }
};

using MpiTransfers = std::deque<MpiTransfer*>;

// What there is between this rank and another.
struct MpiRoute {
    int rank = -1;  // in the world
    nb::object number{};
    bool met = false;
    unsigned sends = 0;       // since this rank has last looked at what that one has sent
    MpiTransfers incoming{};  // receives, in the order of the calls
    MpiTransfers offered{};   // sends of messages with a body
};

// A transfer is among those of its route for as long as this lives.
class ListedMpiTransfer {
public:
    // `under_way` counts those of all routes.
    ListedMpiTransfer(int& under_way, MpiTransfers& line, MpiTransfer& transfer)
        : under_way_(under_way), line_(line), transfer_(transfer) {
        line_.push_back(&transfer_);
        ++under_way_;
    }
    ~ListedMpiTransfer() {
        std::erase(line_, &transfer_);
        --under_way_;
    }
    ListedMpiTransfer(const ListedMpiTransfer&) = delete;
    ListedMpiTransfer& operator=(const ListedMpiTransfer&) = delete;

private:
    int& under_way_;
    MpiTransfers& line_;
    MpiTransfer& transfer_;
};

}  // namespace phalanx
