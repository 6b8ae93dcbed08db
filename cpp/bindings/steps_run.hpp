// The steps of a schedule as Python holds them: the plan, and a run of it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.hpp"
#include "gil.hpp"
#include "phalanx/steps.hpp"

namespace phalanx {

namespace nb = nanobind;

// The steps of one schedule as numbers; made once, used by every collective with that schedule.
struct Plan {
    // For each step: how many sends and receives, then (channel, chunk) of each send and (channel, chunk, flags) of each
    // receive. Flags: 1 reduce, 2 before, 4 late.
    explicit Plan(const std::vector<int>& numbers) {
        auto made = std::make_shared<std::vector<Step>>();
        auto next = numbers.begin();
        const auto take = [&] {
            if (next == numbers.end()) throw nb::value_error("the plan is cut short");
            return *next++;
        };
        while (next != numbers.end()) {
            Step step;
            const int sends = take();
            const int recvs = take();
            for (int i = 0; i < sends; ++i) {
                const int channel = take();
                step.sends.emplace_back(channel, take());
            }
            for (int i = 0; i < recvs; ++i) {
                const int channel = take();
                const int chunk = take();
                const int flags = take();
                step.recvs.emplace_back(channel, Recv{chunk, (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0});
            }
            made->push_back(std::move(step));
        }
        steps = std::move(made);
    }

    std::shared_ptr<const std::vector<Step>> steps;
};

// A run of the steps, with the memory that it needs held in place.
class Run {
public:
    Run(const Plan& plan, nb::list chunks, nb::list sources, const std::vector<int>& out, const std::vector<int>& in,
        std::uint64_t fingerprint, int dtype, int op, WaitPolicy& policy)
        : wait_(policy) {
        std::vector<Chunk> memory;
        memory.reserve(nb::len(chunks));
        const std::size_t item = dtype >= 0 ? item_size(static_cast<Dtype>(dtype)) : 1;
        if (nb::len(sources) != nb::len(chunks) || item == 0) throw nb::value_error("sources do not go with chunks");
        for (std::size_t i = 0; i < nb::len(chunks); ++i) {
            buffers_.push_back(std::make_unique<Buffer>(chunks[i], PyBUF_SIMPLE));
            Chunk chunk{buffers_.back()->data(), nullptr, buffers_.back()->bytes()};
            if (!sources[i].is_none()) {
                buffers_.push_back(std::make_unique<Buffer>(sources[i], PyBUF_SIMPLE));
                chunk.own = buffers_.back()->data();
                if (buffers_.back()->bytes() != chunk.size) throw nb::value_error("a source differs in size");
            }
            if (chunk.size % item != 0) throw nb::value_error("a chunk does not hold a whole number of items");
            memory.push_back(chunk);
        }
        check(plan, memory.size(), out.size(), in.size(), dtype, op);
        std::vector<int> watched = out;
        watched.insert(watched.end(), in.begin(), in.end());
        steps_ = std::make_unique<Steps>(plan.steps, std::move(memory), out, in, watched, fingerprint,
                                         static_cast<Dtype>(std::max(dtype, 0)), static_cast<Op>(std::max(op, 0)));
    }

    // Steps that are under way already, and the objects whose memory they use.
    Run(std::unique_ptr<Steps> steps, std::unique_ptr<std::byte[]> scratch, nb::object x, nb::object out, WaitPolicy& policy)
        : steps_(std::move(steps)), wait_(policy), scratch_(std::move(scratch)), x_(std::move(x)), out_(std::move(out)) {}

    int move(std::size_t piece) {
        const WithoutGil released;
        return static_cast<int>(steps_->move(wait_, piece));
    }

    std::size_t where() const { return steps_->where(); }
    int error() const { return steps_->error(); }
    bool sends_to(std::size_t i) const { return steps_->sends_to(i); }
    bool receives_from(std::size_t i) const { return steps_->receives_from(i); }
    bool halfway(std::size_t i) const { return steps_->halfway(i); }

    nb::bytes refused() const {
        const auto [memory, size] = steps_->behind();
        std::vector<std::byte> all(sizeof(FrameHeader) + size);
        std::memcpy(all.data(), &steps_->header(), sizeof(FrameHeader));
        if (size > 0) std::memcpy(all.data() + sizeof(FrameHeader), memory, size);
        return nb::bytes(all.data(), all.size());
    }

    static void check(const Plan& plan, std::size_t chunks, std::size_t out, std::size_t in, int dtype, int op) {
        const auto is_below = [](int number, std::size_t bound) {
            return number >= 0 && static_cast<std::size_t>(number) < bound;
        };
        const bool reduces = dtype >= 0 && op >= 0 && has_op(static_cast<Dtype>(dtype), static_cast<Op>(op));
        for (const Step& step : *plan.steps) {
            for (const auto& [channel, chunk] : step.sends)
                if (!is_below(channel, out) || !is_below(chunk, chunks)) throw nb::value_error("no such channel or chunk");
            for (const auto& [channel, recv] : step.recvs) {
                if (!is_below(channel, in) || !is_below(recv.chunk, chunks)) throw nb::value_error("no such channel or chunk");
                if ((recv.reduce || recv.late) && !reduces) throw nb::value_error("this dtype has no such operation");
            }
        }
    }

private:
    std::vector<std::unique_ptr<Buffer>> buffers_;
    std::unique_ptr<Steps> steps_;
    Wait wait_;
    std::unique_ptr<std::byte[]> scratch_;
    nb::object x_, out_;
};

}  // namespace phalanx
