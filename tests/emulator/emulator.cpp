// SPDX-License-Identifier: Apache-2.0
#include "emulator.hpp"

#include "card.hpp"

#include <boost/context/fiber.hpp>
#include <boost/context/pooled_fixedsize_stack.hpp>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <utility>
#include <vector>

namespace emulator {
namespace {

namespace context = boost::context;

constexpr std::size_t kSharedAlignment = 1024;

struct Copy {
  void* target;
  const void* source;
  int bytes;  // negative: so many zeros
};

int size_of(const Copy& copy) { return std::abs(copy.bytes); }
void run(const Copy& copy) {
  const auto size = static_cast<std::size_t>(size_of(copy));
  if (copy.bytes < 0)
    std::memset(copy.target, 0, size);
  else
    std::memcpy(copy.target, copy.source, size);
}

/// Until it is run, its target holds neither what it held nor what it gets.
Copy begin(const Copy& copy) {
  std::memset(copy.target, 0xff, static_cast<std::size_t>(size_of(copy)));
  return copy;
}

struct Thread {
  uint3 index{};
  context::fiber fiber;  // suspended
  bool done = false;
  const char* waits_for = "";
  const uint64_t* news = nullptr;  // it has nothing to do while this is `seen`
  uint64_t seen = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Warp {
  int arrived = 0;
  uint64_t generation = 0;
  const char* kind = nullptr;
  void* in[32];
  void* out[32];
};

struct Barrier {
  int arrived = 0;
  int expected = 0;
  uint64_t generation = 0;
};

struct Mbarrier {
  int arrivals = 0, arrived = 0;
  int64_t missing_bytes = 0;  // expected and not copied
  std::vector<Copy> copies;   // not done yet
  uint64_t phase = 0;
  uint64_t news = 0;  // ended phases and copies to do
};

struct Block {
  uint3 index{};
  dim3 size, grid;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Barrier barriers[16];
  bool any = false, any_result = false;
  std::vector<unsigned char> shared;
};

/// Blocks that run together; one where a kernel has no clusters.
struct Cluster {
  std::vector<Block> blocks;
  std::deque<Mbarrier> mbarriers;
  Barrier barrier;
  uint64_t progress = 0;
  const std::function<void()>* body = nullptr;
  unsigned left = 0;                  // threads that are not done
  unsigned next = 0, end = 0;         // those of a warp that have not had their turn
  context::fiber between_warps;       // run_round(), suspended
  context::fiber* leaving = nullptr;  // where the fiber that is left last belongs
};

thread_local Cluster* cluster = nullptr;
thread_local Block* block = nullptr;
thread_local Thread* self = nullptr;
thread_local Graph* capture = nullptr;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "emulator: block %u thread %u: %s\n", block->index.x,
               self ? self->index.x : 0, what);
  std::abort();
}

/// Returns the fiber that runs next: the warp's next thread that can go on, else run_round().
context::fiber& next_fiber() {
  while (cluster->next < cluster->end) {
    Thread& thread = block->threads[cluster->next++];
    if (thread.done || (thread.news && *thread.news == thread.seen)) continue;
    self = &thread;
    threadIdx = thread.index;
    return thread.fiber;
  }
  return cluster->between_warps;
}

/// From the fiber that runs to `next`; `left` keeps the former. It returns when a third one, which
/// it puts where that belongs, has passed on to the former.
void pass_on(context::fiber& left, context::fiber& next) {
  cluster->leaving = &left;
  context::fiber last = std::move(next).resume();
  *cluster->leaving = std::move(last);
}

context::fiber run_thread(context::fiber&& last) {
  *cluster->leaving = std::move(last);
  (*cluster->body)();
  self->done = true;
  ++cluster->progress;
  --cluster->left;
  cluster->leaving = &self->fiber;  // it gets an empty one
  return std::move(next_fiber());
}

/// One step of every thread of a block that can go on, by warps in random order, a new one every
/// round: orders that happen to work are not enough.
void run_round(Block& of, std::vector<unsigned>& order, std::mt19937& random) {
  block = &of;
  blockIdx = of.index;
  std::shuffle(order.begin(), order.end(), random);
  for (const unsigned warp : order) {
    cluster->next = warp * 32;
    cluster->end = std::min(warp * 32 + 32, of.size.x);
    context::fiber& first = next_fiber();
    if (&first != &cluster->between_warps) pass_on(cluster->between_warps, first);
  }
}

/// A block runs until it waits for another one: its static shared memory is that of the whole
/// cluster here.
void run_cluster(const std::function<void()>& body, std::mt19937& random) {
  static thread_local context::pooled_fixedsize_stack stacks(256 * 1024);
  cluster->body = &body;
  for (Block& each : cluster->blocks) {
    cluster->left += each.size.x;
    for (unsigned i = 0; i < each.size.x; ++i) {
      Thread& thread = each.threads[i];
      thread.index = {i, 0, 0};
      thread.fiber = context::fiber(std::allocator_arg, stacks, run_thread);
    }
  }
  std::vector<unsigned> order(cluster->blocks[0].warps.size());
  for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
  for (int idle = 0; cluster->left > 0;) {
    const uint64_t before = cluster->progress;
    for (Block& each : cluster->blocks)
      for (uint64_t last = ~uint64_t{0}; cluster->progress != last;) {
        last = cluster->progress;
        run_round(each, order, random);
      }
    idle = cluster->progress == before ? idle + 1 : 0;
    if (idle < 4) continue;
    for (const Block& each : cluster->blocks)
      for (const Thread& thread : each.threads)
        if (!thread.done)
          std::fprintf(stderr, "emulator: block %u thread %u waits for %s\n", each.index.x,
                       thread.index.x, thread.waits_for);
    fail("deadlock");
  }
  self = nullptr;
}

/// Lets other threads run until `*news` is another number; without one, until the next round.
void wait_for_news(const char* what, const uint64_t* news) {
  Thread* me = self;
  me->waits_for = what;
  me->news = news;
  if (news) me->seen = *news;
  pass_on(me->fiber, next_fiber());
}

}  // namespace

void note_progress() { ++cluster->progress; }

void wait_for(const char* what) { wait_for_news(what, nullptr); }

void begin_capture() { capture = new Graph; }
Graph end_capture() {
  Graph graph = std::move(*capture);
  delete std::exchange(capture, nullptr);
  return graph;
}

void launch(dim3 grid, dim3 size, unsigned of_cluster, std::size_t shared_bytes,
            std::function<void()> body) {
  if (capture) {
    capture->push_back([=] { launch(grid, size, of_cluster, shared_bytes, body); });
    return;
  }
  if (shared_bytes > static_cast<std::size_t>(most_shared_bytes())) {
    std::fprintf(stderr, "emulator: a block has %zu bytes of shared memory, at most %d fit\n",
                 shared_bytes, most_shared_bytes());
    std::abort();
  }
  std::mt19937 random(grid.x * 31 + size.x);
  blockDim = size;
  gridDim = grid;
  for (unsigned b = 0; b < grid.x; b += of_cluster) {
    Cluster current;
    current.blocks.resize(of_cluster);
    for (unsigned i = 0; i < of_cluster; ++i) {
      Block& each = current.blocks[i];
      each.index = {b + i, 0, 0};
      each.size = size;
      each.grid = grid;
      each.threads.resize(size.x);
      each.warps.resize((size.x + 31) / 32);
      each.shared.assign(shared_bytes + kSharedAlignment, 0xff);
    }
    cluster = &current;
    run_cluster(body, random);
    cluster = nullptr;
    block = nullptr;
  }
}

int cluster_rank() { return static_cast<int>(block - cluster->blocks.data()); }
void cluster_barrier() {
  Barrier& b = cluster->barrier;
  ++cluster->progress;
  if (++b.arrived == static_cast<int>(cluster->blocks.size() * block->size.x)) {
    b.arrived = 0;
    ++b.generation;
    return;
  }
  wait_for_news("a barrier of the cluster", &b.generation);
}

void warp_collective(const char* kind, void* in, void* out, Compute compute) {
  Warp& warp = block->warps[self->index.x / 32];
  const unsigned lane = self->index.x % 32;
  if (warp.arrived > 0 && warp.kind != kind && std::strcmp(warp.kind, kind) != 0)
    fail("lanes of a warp do different things");
  warp.kind = kind;
  warp.in[lane] = in;
  warp.out[lane] = out;
  if (++warp.arrived == 32) {
    compute(warp.in, warp.out);
    warp.arrived = 0;
    ++warp.generation;
    ++cluster->progress;
    return;
  }
  wait_for_news(kind, &warp.generation);
}

void barrier(int id, int threads, bool waits) {
  Barrier& b = block->barriers[id];
  if (b.arrived > 0 && b.expected != threads) fail("a barrier with different numbers of threads");
  b.expected = threads;
  ++cluster->progress;
  if (++b.arrived == threads) {
    b.arrived = 0;
    ++b.generation;
    return;
  }
  if (waits) wait_for_news("a barrier", &b.generation);
}

Mbarrier& mbarrier(uint64_t index) {
  if (index >= cluster->mbarriers.size()) fail("an mbarrier that is not initialised");
  return cluster->mbarriers[index];
}

uint64_t mbarrier_init(int arrivals) {
  cluster->mbarriers.emplace_back().arrivals = arrivals;
  return cluster->mbarriers.size() - 1;
}

void end_phase(Mbarrier& b) {
  if (b.arrived < b.arrivals || b.missing_bytes != 0) return;
  b.arrived = 0;
  ++b.phase;
  ++b.news;
  ++cluster->progress;
}

void mbarrier_arrive(uint64_t index, int expected_bytes) {
  Mbarrier& b = mbarrier(index);
  if (++b.arrived > b.arrivals) fail("more arrivals at an mbarrier than it has");
  b.missing_bytes += expected_bytes;
  ++cluster->progress;
  end_phase(b);
}

void mbarrier_arrive_after_copies(uint64_t index) {
  Mbarrier& b = mbarrier(index);
  for (const Copy& copy : std::exchange(self->open, {})) {
    b.missing_bytes += size_of(copy);
    b.copies.push_back(copy);
    ++b.news;
  }
  mbarrier_arrive(index, 0);
}

void check_bulk_copy(const void* target, const void* source, int bytes) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (bytes % 16 != 0 || !aligned(target) || !aligned(source))
    fail("a bulk copy not aligned to 16");
}
void cp_async_bulk(void* target, const void* source, int bytes, uint64_t index) {
  check_bulk_copy(target, source, bytes);
  Mbarrier& b = mbarrier(index);
  b.copies.push_back(begin({target, source, bytes}));
  ++b.news;
}
void cp_async_bulk_store(void* target, const void* source, int bytes) {
  check_bulk_copy(target, source, bytes);
  self->open.push_back({target, source, bytes});
}

void mbarrier_wait(uint64_t index, int parity) {
  const auto over = [&] { return static_cast<int>(mbarrier(index).phase % 2) != parity; };
  while (!over()) {
    Mbarrier& b = mbarrier(index);
    for (const Copy& copy : std::exchange(b.copies, {})) {
      run(copy);
      b.missing_bytes -= size_of(copy);
    }
    end_phase(b);
    if (!over()) wait_for_news("an mbarrier", &b.news);
  }
}

bool block_or(bool value) {
  block->any |= value;
  barrier(0, static_cast<int>(block->size.x), true);
  const bool result = block->any;
  barrier(0, static_cast<int>(block->size.x), true);
  block->any = false;
  barrier(0, static_cast<int>(block->size.x), true);
  return result;
}

unsigned char* shared_of(Block& of) {
  auto address = reinterpret_cast<uintptr_t>(of.shared.data());
  return reinterpret_cast<unsigned char*>((address + kSharedAlignment - 1) / kSharedAlignment *
                                          kSharedAlignment);
}
unsigned char* dynamic_shared() { return shared_of(*block); }
void* shared_pointer_in(uint32_t offset, int rank) {
  if (rank < 0 || rank >= static_cast<int>(cluster->blocks.size()))
    fail("a block that the cluster does not have");
  return shared_of(cluster->blocks[static_cast<std::size_t>(rank)]) + offset;
}
uint32_t shared_offset(const void* pointer) {
  const auto offset = static_cast<const unsigned char*>(pointer) - dynamic_shared();
  if (offset < 0 || offset >= static_cast<std::ptrdiff_t>(block->shared.size()))
    fail("an address outside dynamic shared memory");
  return static_cast<uint32_t>(offset);
}
void* shared_pointer(uint32_t offset, int alignment) {
  if (offset % static_cast<uint32_t>(alignment) != 0) fail("a misaligned address in shared memory");
  if (offset + kSharedAlignment > block->shared.size())
    fail("an offset outside dynamic shared memory");
  return dynamic_shared() + offset;
}

void copy_async(void* target, const void* source, int bytes) {
  if (bytes > 0 && reinterpret_cast<uintptr_t>(source) % static_cast<uintptr_t>(bytes) != 0)
    fail("a copy from a misaligned address");
  self->open.push_back(begin({target, source, bytes}));
}
void commit_copies() {
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}
void wait_copies(int pending) {
  while (static_cast<int>(self->groups.size()) > pending) {
    for (const Copy& copy : self->groups.front()) run(copy);
    self->groups.pop_front();
  }
}

}  // namespace emulator
