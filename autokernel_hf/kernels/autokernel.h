#include <stdint.h>
typedef struct { void *data; const int64_t *sizes, *strides; int32_t ndim, dtype; } AkTensor;   /* strides in elements */
typedef struct { void *stream, *workspace; int64_t workspace_bytes; int32_t device, num_threads; } AkContext;
enum { AK_U8=0, AK_I32=3, AK_I64=4, AK_F16=5, AK_F32=6, AK_F64=7, AK_BOOL=11, AK_BF16=15, AK_F8E4M3=24 };
enum { AK_OK=0, AK_UNSUPPORTED=-1, AK_NEED_CONTIGUOUS=-2 };   /* > 0: a cudaError_t */
