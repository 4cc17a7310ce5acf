// A GPU that is not there: what torch asks of the CUDA runtime, the driver, NVML and cuBLAS, over bare numbers.
// Addresses only grow and are never used again. Nothing lies behind them, unless `fake_has_memory` is set: then there is
// memory of the host, which copies read and write; kernels are launched and do nothing. `cuda_build.py` compiles and
// preloads it. Its settings are exported variables; each starts with what the environment variable of the same name in
// capitals says (FAKE_HAS_MEMORY=1).

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {

constexpr uint64_t kPage = 2 << 20;
constexpr size_t kZeroed = 64 << 10;

uint64_t next_address = uint64_t{1} << 40;
uint64_t next_handle = 1;
struct Given {
  uint64_t bytes = 0;
  int device = 0;
};

std::unordered_map<uint64_t, Given> given;  // by address from cudaMalloc, by handle from cuMemCreate

struct Marks {
  uint64_t begun = 0, done = 0;  // events recorded on a stream, and those that it has reached
};

std::unordered_map<void*, Marks> streams;

struct Recorded {
  void* stream = nullptr;
  uint64_t number = 0;  // on its stream
  uint64_t us = 0;      // when the device reaches it
};

std::unordered_map<void*, Recorded> events;

std::set<void*> capturing;  // streams
uint64_t capture_id = 0, launches_before_capture = 0;
std::unordered_map<void*, uint64_t> graph_nodes;  // by graph

std::vector<std::function<void()>> captured_copies;
std::unordered_map<void*, std::vector<std::function<void()>>> graph_copies;  // by graph

bool is_captured(void* stream) {
  return capturing.count(stream) != 0;
}

// Copies and settings of memory, which are made at once, or by each launch of the graph that is being captured.
void now_or_at_launch(void* stream, std::function<void()> copy) {
  if (is_captured(stream)) {
    captured_copies.push_back(std::move(copy));
  } else {
    copy();
  }
}

uint64_t in_pages(uint64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

static uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text == nullptr ? otherwise : strtoull(text, nullptr, 10);
}

extern "C" {

int fake_has_memory = setting("FAKE_HAS_MEMORY", 0);  // before anything is allocated
int fake_devices = setting("FAKE_DEVICES", 1);        // before torch is initialized
uint64_t fake_capacity_bytes = setting("FAKE_CAPACITY_BYTES", uint64_t{64} << 30);  // torch reads the total once
int fake_vmm_fails = setting("FAKE_VMM_FAILS", 0);    // segments cannot be mapped, as under WSL2
uint64_t fake_gemm_us = setting("FAKE_GEMM_US", 0);   // the time of each matrix product on the device

uint64_t fake_launches = 0, fake_graph_launches = 0, fake_waits = 0, fake_cublas_handles = 0;
constexpr int kDevices = 8;
uint64_t fake_held_on[kDevices] = {0}, fake_peak_on[kDevices] = {0};  // bytes, by device; the peak may be set back
uint64_t fake_mallocs_on[kDevices] = {0}, fake_streams_on[kDevices] = {0}, fake_registers_on[kDevices] = {0},
         fake_launches_on[kDevices] = {0}, fake_contexts_on[kDevices] = {0};  // of contexts there is one or none

}  // extern "C"

static thread_local int current_device = 0;

// All calls for which the runtime makes a context of the current device, as far as torch makes them without one.
static void use_device() {
  fake_contexts_on[current_device] = 1;
}

// The device makes products one after the other, and all else at once.
static uint64_t busy_until_us = 0;

static uint64_t now_us() {
  using namespace std::chrono;
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

static void sleep_until(uint64_t us) {
  for (uint64_t now = now_us(); now < us; now = now_us()) usleep(us - now);
}

namespace {

uint64_t reserve(uint64_t bytes) {
  const uint64_t address = next_address;
  next_address += in_pages(bytes);
  if (fake_has_memory) {
    constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    mmap(reinterpret_cast<void*>(address), in_pages(bytes), PROT_READ | PROT_WRITE, flags, -1, 0);
  }
  return address;
}

void give(uint64_t name, uint64_t bytes, int device) {
  given[name] = {bytes, device};
  fake_held_on[device] += bytes;
  fake_peak_on[device] = std::max(fake_peak_on[device], fake_held_on[device]);
}

void take_back(uint64_t name) {
  const Given& gone = given.at(name);
  fake_held_on[gone.device] -= gone.bytes;
  given.erase(name);
}

bool is_full(uint64_t bytes, int device) {
  return fake_held_on[device] + bytes > fake_capacity_bytes;
}

struct Pool {
  uint64_t used = 0, most_used = 0, held = 0, most_held = 0;
};

Pool pools[kDevices];
std::unordered_map<uint64_t, Given> pooled;  // by address from cudaMallocAsync

void hold(int device, uint64_t bytes) {
  Pool& pool = pools[device];
  fake_held_on[device] += bytes - pool.held;
  fake_peak_on[device] = std::max(fake_peak_on[device], fake_held_on[device]);
  pool.held = bytes;
  pool.most_held = std::max(pool.most_held, bytes);
}

void unmap(void* address, uint64_t bytes) {
  if (fake_has_memory) {
    munmap(address, in_pages(bytes));
  }
}

}  // namespace

extern "C" {

// Lets a stream reach all that was recorded on it.
void fake_finish(void* stream) {
  streams[stream].done = streams[stream].begun;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = fake_devices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  current_device = device;
  use_device();
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "fake");
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerMultiprocessor = properties->sharedMemPerBlockOptin = 227 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
  properties->l2CacheSize = 50 << 20;
  for (int each = 0; each < 3; ++each) properties->maxGridSize[each] = 65535, properties->maxThreadsDim[each] = 1024;
  properties->totalGlobalMem = fake_capacity_bytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const std::map<int, int> known = {
      {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrComputeCapabilityMajor, 9},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 227 << 10},
      {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
  };
  const auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (!capturing.empty()) return cudaErrorStreamCaptureUnsupported;
  use_device();
  sleep_until(busy_until_us);
  for (auto& [stream, marks] : streams) marks.done = marks.begun;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

cudaError_t cudaPeekAtLastError() {
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  use_device();
  *total = fake_capacity_bytes;
  *free = fake_capacity_bytes - fake_held_on[current_device];
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  use_device();
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (is_full(bytes, current_device)) return cudaErrorMemoryAllocation;
  const uint64_t address = reserve(bytes);
  give(address, bytes, current_device);
  ++fake_mallocs_on[current_device];
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = given.find(reinterpret_cast<uint64_t>(pointer));
  if (found == given.end()) return cudaErrorInvalidValue;
  unmap(pointer, found->second.bytes);
  take_back(found->first);
  return cudaSuccess;
}

// The pool of a device, as torch's `cudaMallocAsync` backend uses it: it holds what it has once taken until it is
// trimmed, and all that is free in it serves any request.

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(&pools[device]);
  return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) {
  use_device();
  Pool& pool = pools[current_device];
  *pointer = nullptr;
  if (bytes == 0) return cudaSuccess;
  const uint64_t held = std::max(pool.held, in_pages(pool.used + bytes));
  if (is_full(held - pool.held, current_device)) return cudaErrorMemoryAllocation;
  hold(current_device, held);
  pool.used += bytes;
  pool.most_used = std::max(pool.most_used, pool.used);
  const uint64_t address = reserve(bytes);
  pooled[address] = {bytes, current_device};
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = pooled.find(reinterpret_cast<uint64_t>(pointer));
  if (found == pooled.end()) return cudaErrorInvalidValue;
  pools[found->second.device].used -= found->second.bytes;
  unmap(pointer, found->second.bytes);
  pooled.erase(found);
  return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t least) {
  const int device = reinterpret_cast<Pool*>(pool) - pools;
  hold(device, std::min(pools[device].held, std::max<uint64_t>(least, in_pages(pools[device].used))));
  return cudaSuccess;
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  const Pool& of = *reinterpret_cast<Pool*>(pool);
  const std::map<int, uint64_t> known = {{cudaMemPoolAttrReservedMemCurrent, of.held},
                                         {cudaMemPoolAttrReservedMemHigh, of.most_held},
                                         {cudaMemPoolAttrUsedMemCurrent, of.used},
                                         {cudaMemPoolAttrUsedMemHigh, of.most_used}};
  *static_cast<uint64_t*>(value) = known.at(attribute);
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void*) {
  Pool& of = *reinterpret_cast<Pool*>(pool);
  if (attribute == cudaMemPoolAttrReservedMemHigh) of.most_held = of.held;
  if (attribute == cudaMemPoolAttrUsedMemHigh) of.most_used = of.used;
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) {
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  use_device();
  *event = reinterpret_cast<cudaEvent_t>(++next_handle);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  events.erase(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  events[event] = {stream, ++streams[stream].begun, std::max(now_us(), busy_until_us)};
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto [stream, number, us] = events[event];
  if (fake_gemm_us != 0 && now_us() >= us) return cudaSuccess;
  return streams[stream].done >= number ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const auto [stream, number, us] = events[event];
  sleep_until(std::min(us, busy_until_us));
  if (streams[stream].done < number) streams[stream].done = number;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  use_device();
  ++fake_streams_on[current_device];
  *stream = reinterpret_cast<cudaStream_t>(++next_handle << 8);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_captured(stream)) return cudaErrorStreamCaptureUnsupported;
  use_device();
  sleep_until(busy_until_us);
  fake_finish(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return streams[stream].done == streams[stream].begun ? cudaSuccess : cudaErrorNotReady;
}

// Capture: launches count as nodes of one graph while a stream, or one that waits for an event of it, is captured.

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!capturing.empty()) return cudaErrorIllegalState;
  capturing.insert(stream);
  ++capture_id;
  launches_before_capture = fake_launches;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  if (!is_captured(stream)) return cudaErrorIllegalState;
  capturing.clear();
  *graph = reinterpret_cast<cudaGraph_t>(++next_handle);
  graph_copies[*graph] = std::move(captured_copies);
  captured_copies.clear();
  graph_nodes[*graph] = fake_launches - launches_before_capture;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id != nullptr) *id = capture_id;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = graph_nodes[graph];
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  ++fake_graph_launches;
  for (const auto& copy : graph_copies[exec]) copy();
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t) {
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

// Work on streams: copies are made at once, kernels do nothing.

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  now_or_at_launch(stream, [=] { memmove(to, from, bytes); });
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (value != 0 || bytes <= kZeroed) {  // fresh memory of the host is zero anyhow
    now_or_at_launch(stream, [=] { memset(to, value, bytes); });
  }
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  use_device();
  ++fake_launches_on[current_device];
  ++fake_launches;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  use_device();
  ++fake_launches;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto recorded = events.find(event);
  if (recorded != events.end() && is_captured(recorded->second.stream)) capturing.insert(stream);
  ++fake_waits;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  use_device();
  *event = reinterpret_cast<cudaEvent_t>(++next_handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  *milliseconds = fake_gemm_us == 0 ? 0.01F : 1e-3F * static_cast<float>(events[end].us - events[begin].us);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  use_device();
  *pointer = malloc(bytes);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  use_device();
  ++fake_registers_on[current_device];
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void*) {
  use_device();
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  free(pointer);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  const bool is_here = reinterpret_cast<uint64_t>(pointer) >> 40 == 1;
  attributes->type = is_here ? cudaMemoryTypeDevice : cudaMemoryTypeUnregistered;
  attributes->device = current_device;
  return cudaSuccess;
}

// The driver's virtual memory, as expandable segments use it.

static CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

static CUresult device_attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

static CUresult address_reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  *address = reserve(bytes);
  return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* properties,
                       unsigned long long) {
  if (is_full(bytes, properties->location.id)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = ++next_handle;
  give(*handle, bytes, properties->location.id);
  return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
  take_back(handle);
  return CUDA_SUCCESS;
}

static CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = kPage;
  return CUDA_SUCCESS;
}

static CUresult error_string(CUresult, const char** text) {
  *text = "refused by the fake";
  return CUDA_SUCCESS;
}

static CUresult set_access() {
  return fake_vmm_fails ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static CUresult nothing() {
  return CUDA_SUCCESS;
}

static CUresult refused() {
  return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned*, int*);

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static const std::map<std::string_view, void*> known = {
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(cuDevicePrimaryCtxGetState)},
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_attribute)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(address_reserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuGetErrorString", reinterpret_cast<void*>(error_string)},
      {"cuMemMap", reinterpret_cast<void*>(nothing)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
      {"cuMemUnmap", reinterpret_cast<void*>(nothing)},
      {"cuMemAddressFree", reinterpret_cast<void*>(nothing)},
  };
  const auto entry_of = known.find(name);
  *entry = entry_of == known.end() ? reinterpret_cast<void*>(refused) : entry_of->second;
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = static_cast<int>(fake_contexts_on[device]);
  return CUDA_SUCCESS;
}

// NVML, which is asked for what else runs there.

int nvmlInit_v2() {
  return 0;
}

int nvmlInit() {
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {  // asked for in CUDA's place by processes that will fork
  *count = fake_devices;
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return 0;
}

int nvmlDeviceGetGpuFabricInfoV(void*, void*) {
  return 3;  // NVML_ERROR_NOT_SUPPORTED
}

int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return 0;
}

int nvmlDeviceGetNvLinkRemoteDeviceType() {
  return 3;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2() {
  return 3;
}

int nvmlSystemGetCudaDriverVersion_v2() {
  return 3;
}

// cuBLAS, whose products are never computed.

#define DONE(name)              \
  int done_##name() asm(#name); \
  int done_##name() {           \
    return 0;                   \
  }

#define PRODUCT(name)                \
  int product_##name() asm(#name);   \
  int product_##name() {             \
    busy_until_us = std::max(now_us(), busy_until_us) + fake_gemm_us; \
    return 0;                        \
  }

DONE(cublasDestroy_v2)
DONE(cublasGetMathMode)
DONE(cublasGetPointerMode_v2)
DONE(cublasSetMathMode)
DONE(cublasSetPointerMode_v2)
DONE(cublasSetStream_v2)
DONE(cublasSetWorkspace_v2)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemmStridedBatched)
DONE(cublasSgemv_v2)
DONE(cublasSdot_v2)
PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasLtMatmul)
DONE(cublasLtMatmulDescDestroy)
DONE(cublasLtMatmulDescSetAttribute)
DONE(cublasLtMatmulPreferenceDestroy)
DONE(cublasLtMatmulPreferenceSetAttribute)
DONE(cublasLtMatrixLayoutDestroy)
DONE(cublasLtMatrixLayoutSetAttribute)

#define MADE(name)                           \
  int made_##name(void** thing) asm(#name);  \
  int made_##name(void** thing) {            \
    *thing = reinterpret_cast<void*>(&made_##name); \
    return 0;                                \
  }

int made_handle(void** thing) asm("cublasCreate_v2");
int made_handle(void** thing) {  // torch keeps workspaces by handle: each has another
  *thing = reinterpret_cast<void*>(0x1000 + 64 * ++fake_cublas_handles);
  return 0;
}
MADE(cublasLtMatmulDescCreate)
MADE(cublasLtMatmulPreferenceCreate)
MADE(cublasLtMatrixLayoutCreate)
MADE(cuCtxGetCurrent)

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void*, int* count) {
  *count = 1;  // what it finds is all zeros
  return 0;
}

// Modules and launches of the driver, as Triton and Inductor use them. No code is read, and none runs.

// Declares a function of the driver with a body; the header declares it with other types.
#define DRIVERS(name, arguments)     \
  int drivers_##name arguments asm(#name); \
  int drivers_##name arguments

DRIVERS(cuDeviceGet, (int* device, int ordinal)) {
  return device_get(device, ordinal);
}

DRIVERS(cuDeviceGetAttribute, (int* value, int attribute)) {  // both enumerations have the same numbers
  return cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), 0);
}

DRIVERS(cuFuncGetAttribute, (int* value, int attribute)) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}

DRIVERS(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int* blocks)) {
  *blocks = 2;
  return 0;
}

DRIVERS(cuOccupancyMaxActiveClusters, (int* clusters)) {
  *clusters = 132;
  return 0;
}

DRIVERS(cuPointerGetAttribute, (uint64_t* value, int attribute, uint64_t pointer)) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  *value = pointer;
  return 0;
}

DRIVERS(cuCtxGetLimit, (size_t* bytes)) {
  *bytes = 1 << 20;
  return 0;
}

#define HANDLE(name)                                \
  DRIVERS(name, (void** thing)) {                   \
    *thing = reinterpret_cast<void*>(++next_handle); \
    return 0;                                       \
  }

HANDLE(cuModuleLoad)
HANDLE(cuModuleLoadData)
HANDLE(cuModuleLoadDataEx)
HANDLE(cuModuleGetFunction)
HANDLE(cuDevicePrimaryCtxRetain)

#define LAUNCHED(name)                 \
  DRIVERS(name, ()) {                  \
    ++fake_launches;                   \
    ++fake_launches_on[current_device]; \
    return 0;                          \
  }

LAUNCHED(cuLaunchKernel)
LAUNCHED(cuLaunchKernelEx)
LAUNCHED(cuLaunchCooperativeKernel)
DONE(cuCtxSetCurrent)
DONE(cuCtxSetLimit)
DONE(cuFuncSetAttribute)
DONE(cuFuncSetCacheConfig)
DONE(cuModuleUnload)

// What torch binds when it loads, and does not call here.
#define REFUSED(name)                      \
  CUresult refused_##name() asm(#name);    \
  CUresult refused_##name() {              \
    return CUDA_ERROR_NOT_SUPPORTED;       \
  }

REFUSED(cuGetErrorString)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuTensorMapEncodeTiled)

}  // extern "C"
