// A GPU that is not there: what torch asks of the CUDA runtime, the driver, NVML and cuBLAS, over bare numbers.
// Addresses only grow and are never used again. Nothing lies behind them, unless `fake_has_memory` is set: then there is
// memory of the host, which copies read and write; kernels are launched and do nothing. `cuda_build.py` compiles and
// preloads it. Its settings are exported variables; each starts with what the environment variable of the same name in
// capitals says (FAKE_HAS_MEMORY=1).

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string_view>
#include <unordered_map>

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
std::unordered_map<void*, std::pair<void*, uint64_t>> events;  // its stream, its number there

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

uint64_t fake_launches = 0, fake_waits = 0, fake_cublas_handles = 0;
uint64_t fake_pending_us = 0;  // of products that nobody has waited for
constexpr int kDevices = 8;
uint64_t fake_held_on[kDevices] = {0}, fake_peak_on[kDevices] = {0};  // bytes, by device; the peak may be set back
uint64_t fake_mallocs_on[kDevices] = {0}, fake_streams_on[kDevices] = {0}, fake_registers_on[kDevices] = {0},
         fake_launches_on[kDevices] = {0};

}  // extern "C"

static thread_local int current_device = 0;

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
  usleep(fake_pending_us);
  fake_pending_us = 0;
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
  *total = fake_capacity_bytes;
  *free = fake_capacity_bytes - fake_held_on[current_device];
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
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

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(++next_handle);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  events.erase(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  events[event] = {stream, ++streams[stream].begun};
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto [stream, number] = events[event];
  return streams[stream].done >= number ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const auto [stream, number] = events[event];
  if (streams[stream].done < number) streams[stream].done = number;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  ++fake_streams_on[current_device];
  *stream = reinterpret_cast<cudaStream_t>(++next_handle << 8);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  fake_finish(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return streams[stream].done == streams[stream].begun ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

// Work on streams: copies are made at once, kernels do nothing.

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  if (value != 0 || bytes <= kZeroed) memset(to, value, bytes);  // fresh memory of the host is zero anyhow
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  ++fake_launches_on[current_device];
  ++fake_launches;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
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

cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  ++fake_waits;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(++next_handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0.01F;
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  *pointer = malloc(bytes);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void*, size_t, unsigned) {
  ++fake_registers_on[current_device];
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void*) {
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

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  static const std::map<std::string_view, void*> known = {
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

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

// NVML, which is asked for what else runs there.

int nvmlInit_v2() {
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
    fake_pending_us += fake_gemm_us; \
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

// What torch binds when it loads, and does not call here.
#define REFUSED(name)                      \
  CUresult refused_##name() asm(#name);    \
  CUresult refused_##name() {              \
    return CUDA_ERROR_NOT_SUPPORTED;       \
  }

REFUSED(cuCtxSetCurrent)
REFUSED(cuDeviceGet)
REFUSED(cuDeviceGetAttribute)
REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuGetErrorString)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute)
REFUSED(cuTensorMapEncodeTiled)

}  // extern "C"
