/* A CUDA driver without a device: it notes what is launched, byte by byte. */
#include "cuda.h"
#include <stdint.h>
#include <string.h>

#define MAX_FUNCTIONS 64
#define MAX_PARAMETERS 128

static unsigned char record[1 << 20];
static long used;
static int num_functions, num_encoded, num_launches;
static char early[64], clusters[64];
static int sizes[MAX_FUNCTIONS][MAX_PARAMETERS], counts[MAX_FUNCTIONS];

/* Bytes of each parameter of a function, of which nothing is noted before. */
void fake_set_sizes(uint64_t function, int count, const int *given) {
  counts[function - 1] = count;
  memcpy(sizes[function - 1], given, count * sizeof(int));
}

long fake_take_record(unsigned char *out) {
  long count = used;
  memcpy(out, record, count);
  used = 0;
  return count;
}

/* Launches since the last time: '1' for each that may begin before the one before it is done, and
   how many blocks of threads run side by side. */
int fake_take_launches(char *out, char *sizes_of_clusters) {
  int count = num_launches;
  memcpy(out, early, count);
  memcpy(sizes_of_clusters, clusters, count);
  num_launches = 0;
  return count;
}

int fake_num_encoded(void) { return num_encoded; }

static void note(const void *from, long count) {
  if (used + count <= (long)sizeof(record)) {
    memcpy(record + used, from, count);
    used += count;
  }
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **params, void **extra) {
  uint64_t head[] = {c->gridDimX,       c->gridDimY,          c->gridDimZ, c->blockDimX,
                     c->sharedMemBytes, (uint64_t)c->hStream, c->numAttrs, (uint64_t)f};
  int n = (int)(uint64_t)f - 1;
  note(head, sizeof(head));
  if (num_launches < (int)sizeof(early)) {
    clusters[num_launches] = '1';
    early[num_launches++] = '0';
  }
  for (unsigned i = 0; i < c->numAttrs; i++) {
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
        c->attrs[i].value.programmaticStreamSerializationAllowed)
      early[num_launches - 1] = '1';
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      clusters[num_launches - 1] = (char)('0' + c->attrs[i].value.clusterDim.x);
  }
  for (int i = 0; i < counts[n]; i++)
    note(params[i], sizes[n][i]);
  return 0;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
  uint64_t *words = (uint64_t *)map; /* 16 of them */
  memset(map, 0, sizeof(*map));
  words[0] = (uint64_t)address;
  words[1] = type | rank << 8 | swizzle << 16 | l2 << 20 | fill << 24;
  for (unsigned i = 0; i < rank; i++) {
    words[2 + i] = dims[i];
    words[6 + i] = i + 1 < rank ? strides[i] : 0;
    words[10 + i] = box[i];
  }
  num_encoded++;
  return 0;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : 232448; /* of shared memory */
  return 0;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction f) {
  *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}

CUresult cuModuleGetFunction(CUfunction *f, CUmodule module, const char *name) {
  if (num_functions == MAX_FUNCTIONS)
    return CUDA_ERROR_OUT_OF_MEMORY;
  *f = (CUfunction)(uint64_t)++num_functions;
  return 0;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute which, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return 0;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "error";
  return 0;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return 0;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)1;
  return 0;
}

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) { return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return 0; }
CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute which, int value) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { return 0; }
