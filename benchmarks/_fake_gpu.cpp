// A GPU that is not there: what torch's caching allocator asks of the CUDA runtime and driver, over bare numbers.
// Addresses only grow and are never used again; nothing lies behind them. Preloaded by cuda_allocator.py.

#include <cstdint>
#include <cstring>
#include <map>
#include <string_view>
#include <unordered_map>

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {

constexpr uint64_t kPage = 2 << 20;

uint64_t next_address = uint64_t{1} << 40;
uint64_t next_handle = 1;
uint64_t held_bytes = 0;
std::unordered_map<uint64_t, uint64_t> given;  // by address from cudaMalloc, by handle from cuMemCreate: bytes

struct Marks {
  uint64_t begun = 0, done = 0;  // events recorded on a stream, and those that it has reached
};

std::unordered_map<void*, Marks> streams;
std::unordered_map<void*, std::pair<void*, uint64_t>> events;  // its stream, its number there

uint64_t in_pages(uint64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

uint64_t reserve(uint64_t bytes) {
  const uint64_t address = next_address;
  next_address += in_pages(bytes);
  return address;
}

}  // namespace

extern "C" {

uint64_t fake_capacity_bytes = uint64_t{64} << 30;  // may be set by the caller; torch reads the total once

uint64_t fake_held_bytes() {
  return held_bytes;
}

// Lets a stream reach all that was recorded on it.
void fake_finish(void* stream) {
  streams[stream].done = streams[stream].begun;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
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
  properties->totalGlobalMem = fake_capacity_bytes;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
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
  *free = fake_capacity_bytes - held_bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (held_bytes + bytes > fake_capacity_bytes) return cudaErrorMemoryAllocation;
  const uint64_t address = reserve(bytes);
  given[address] = bytes;
  held_bytes += bytes;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = given.find(reinterpret_cast<uint64_t>(pointer));
  if (found == given.end()) return cudaErrorInvalidValue;
  held_bytes -= found->second;
  given.erase(found);
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

static CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                       unsigned long long) {
  if (held_bytes + bytes > fake_capacity_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = ++next_handle;
  given[*handle] = bytes;
  held_bytes += bytes;
  return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
  held_bytes -= given.at(handle);
  given.erase(handle);
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
      {"cuMemSetAccess", reinterpret_cast<void*>(nothing)},
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

// What torch binds when it loads, and does not call here.
#define REFUSED(name)                      \
  CUresult refused_##name() asm(#name);    \
  CUresult refused_##name() {              \
    return CUDA_ERROR_NOT_SUPPORTED;       \
  }

REFUSED(cuCtxGetCurrent)
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
