// CUDA as far as our kernels use it, with a system thread for each thread of a block and one block at a time.
// A kernel's source, compiled with this in front by g++ -std=c++20, does what it does on a GPU, only slowly.
#include <barrier>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__
#define __device__ static
#define __shared__
#define __restrict__

struct Index { int x; };
static thread_local Index threadIdx;
static Index blockIdx, blockDim;
alignas(16) double shared[1 << 15];  // dynamic shared memory, by the name that our kernels give it

static std::unique_ptr<std::barrier<>> of_block;
static std::vector<std::unique_ptr<std::barrier<>>> of_lanes[33];  // by how many lanes meet
static std::vector<unsigned long long> exchanged;

static void __syncthreads() { of_block->arrive_and_wait(); }

template <class T>
static T __shfl_xor_sync(unsigned mask, T value, int apart) {
    const int lanes = std::popcount(mask), own = threadIdx.x;
    auto& met = *of_lanes[lanes][own / lanes];  // groups are neighbours, and as many as a power of two
    std::memcpy(&exchanged[own], &value, sizeof value);
    met.arrive_and_wait();
    std::memcpy(&value, &exchanged[own ^ apart], sizeof value);
    met.arrive_and_wait();
    return value;
}

template <class Kernel>
static void launch(int blocks, int threads, Kernel kernel) {
    blockDim.x = threads;
    exchanged.assign(threads, 0);
    of_block = std::make_unique<std::barrier<>>(threads);
    for (int lanes = 1; lanes <= 32; lanes *= 2) {
        of_lanes[lanes].clear();
        for (int group = 0; group * lanes < threads; group++)
            of_lanes[lanes].push_back(std::make_unique<std::barrier<>>(lanes));
    }
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        std::memset(shared, 0xff, sizeof shared);  // nothing may be read before it is written: these are NaNs
        std::vector<std::thread> running;
        for (int own = 0; own < threads; own++)
            running.emplace_back([&, own] {
                threadIdx.x = own;
                kernel();
            });
        for (auto& thread : running) thread.join();
    }
}
