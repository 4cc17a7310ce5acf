// A GPU that is not there: what torch asks of the CUDA runtime, the driver, NVML and cuBLAS, over bare numbers.
// Addresses only grow and are never used again. Nothing lies behind them, unless `fake_has_memory` is set: then there is
// memory of the host, which copies read and write; kernels are launched and do nothing. `cuda_build.py` compiles and
// preloads it. Its settings are exported variables; each starts with what the environment variable of the same name in
// capitals says (FAKE_HAS_MEMORY=1).

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
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
uint64_t held_bytes = 0;
std::unordered_map<uint64_t, uint64_t> given;  // by address from cudaMalloc, by handle from cuMemCreate: bytes

struct Marks {
  uint64_t begun = 0, done = 0;  // events recorded on a stream, and those that it has reached
};

std::unordered_map<void*, Marks> streams;
std::unordered_map<void*, std::pair<void*, uint64_t>> events;  // its stream, its number there

std::set<void*> capturing;  // streams
uint64_t capture_id = 0, launches_before_capture = 0;
std::unordered_map<void*, uint64_t> graph_nodes;  // by graph

bool is_captured(void* stream) {
  return capturing.count(stream) != 0;
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

uint64_t fake_launches = 0, fake_waits = 0, fake_graph_launches = 0, fake_cublas_handles = 0;
uint64_t fake_pending_us = 0;  // of products that nobody has waited for
uint64_t fake_mallocs_on[8] = {0}, fake_bytes_on[8] = {0}, fake_streams_on[8] = {0}, fake_registers_on[8] = {0},
         fake_launches_on[8] = {0};  // by device

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

void unmap(void* address, uint64_t bytes) {
  if (fake_has_memory) {
    munmap(address, in_pages(bytes));
  }
}

}  // namespace

extern "C" {

uint64_t fake_held_bytes() {
  return held_bytes;
}

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
  if (!capturing.empty()) return cudaErrorStreamCaptureUnsupported;
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
  *free = fake_capacity_bytes - held_bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (held_bytes + bytes > fake_capacity_bytes) return cudaErrorMemoryAllocation;
  const uint64_t address = reserve(bytes);
  given[address] = bytes;
  held_bytes += bytes;
  ++fake_mallocs_on[current_device];
  fake_bytes_on[current_device] += bytes;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  if (pointer == nullptr) return cudaSuccess;
  const auto found = given.find(reinterpret_cast<uint64_t>(pointer));
  if (found == given.end()) return cudaErrorInvalidValue;
  held_bytes -= found->second;
  unmap(pointer, found->second);
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
  ++fake_streams_on[current_device];
  *stream = reinterpret_cast<cudaStream_t>(++next_handle << 8);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_captured(stream)) return cudaErrorStreamCaptureUnsupported;
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

cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  ++fake_graph_launches;
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

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto recorded = events.find(event);
  if (recorded != events.end() && is_captured(recorded->second.first)) capturing.insert(stream);
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

int nvmlInit() {
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned* count) {  // asked for in place of CUDA's, by whoever wants to fork
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

// Modules and launches of the driver, as Triton and Inductor use them. No code is read, and none runs.

CUresult device_attribute_of_driver(int* value, CUdevice_attribute attribute, CUdevice) asm("cuDeviceGetAttribute");
CUresult device_attribute_of_driver(int* value, CUdevice_attribute attribute, CUdevice) {
  cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), 0);  // both enumerations have the same numbers
  return CUDA_SUCCESS;
}

int loaded_module(void** module) asm("cuModuleLoadData");
int loaded_module(void** module) { *module = reinterpret_cast<void*>(++next_handle); return 0; }
int loaded_module_ex(void** module) asm("cuModuleLoadDataEx");
int loaded_module_ex(void** module) { return loaded_module(module); }
int loaded_file(void** module) asm("cuModuleLoad");
int loaded_file(void** module) { return loaded_module(module); }
int found_function(void** function) asm("cuModuleGetFunction");
int found_function(void** function) { return loaded_module(function); }
int retained_context(void** context) asm("cuDevicePrimaryCtxRetain");
int retained_context(void** context) { return loaded_module(context); }
int found_device(int* device, int ordinal) asm("cuDeviceGet");
int found_device(int* device, int ordinal) { *device = ordinal; return 0; }

int attribute_of_function(int* value, int attribute) asm("cuFuncGetAttribute");
int attribute_of_function(int* value, int attribute) {
  *value = attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}

int blocks_at_once(int* blocks) asm("cuOccupancyMaxActiveBlocksPerMultiprocessor");
int blocks_at_once(int* blocks) { *blocks = 2; return 0; }
int clusters_at_once(int* clusters) asm("cuOccupancyMaxActiveClusters");
int clusters_at_once(int* clusters) { *clusters = 132; return 0; }

int attribute_of_pointer(uint64_t* value, int attribute, uint64_t pointer) asm("cuPointerGetAttribute");
int attribute_of_pointer(uint64_t* value, int attribute, uint64_t pointer) {
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) return CUDA_ERROR_NOT_SUPPORTED;
  *value = pointer;
  return 0;
}

#define LAUNCHED(name)        \
  int launched_##name() asm(#name); \
  int launched_##name() { ++fake_launches; ++fake_launches_on[current_device]; return 0; }

LAUNCHED(cuLaunchKernel)
LAUNCHED(cuLaunchKernelEx)
LAUNCHED(cuLaunchCooperativeKernel)
DONE(cuCtxSetCurrent)
DONE(cuCtxSetLimit)
DONE(cuFuncSetAttribute)
DONE(cuFuncSetCacheConfig)
DONE(cuModuleUnload)

int limit_of_context(size_t* bytes) asm("cuCtxGetLimit");
int limit_of_context(size_t* bytes) { *bytes = 1 << 20; return 0; }

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
