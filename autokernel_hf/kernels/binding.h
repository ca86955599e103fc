// What the bindings of all kernel types share: from torch's boxed calling convention to the plain C of a launcher.
//
// Only torch's stable C interface is used (version 2.11 of it), so that one binary serves torch 2.11 and later, and
// only header-only parts of C++, so that one binary serves any libstdc++ that torch accepts. The generated part of a
// binding includes this file once.
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <stdexcept>

#include <torch/csrc/stable/c/shim.h>

#include "autokernel.h"

namespace ak {

constexpr uint64_t kTorchTarget = 0x020b000000000000ULL;  // the conventions used below, whatever torch is built with
constexpr int kMaxRank = 64;                              // torch's own limit
constexpr uintptr_t kAlignment = 16;                      // what candidates may count on after AK_NEED_CONTIGUOUS

// The stable interface knows one kind of error; by these the Python side tells two others.
#define AK_UNSUPPORTED_PREFIX "autokernel unsupported: "
#define AK_OUT_OF_MEMORY_PREFIX "autokernel out of memory: "

// Since torch 2.13; null before.
extern "C" const char *torch_exception_get_what_without_backtrace() __attribute__((weak));

[[noreturn, gnu::cold, gnu::noinline, gnu::format(printf, 1, 2)]] inline void fail(const char *format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw std::runtime_error(text);
}

inline const char *reason() {
  return torch_exception_get_what_without_backtrace != nullptr ? torch_exception_get_what_without_backtrace()
                                                               : "its reason is on stderr";
}

inline void check(AOTITorchError error, const char *what) {
  if (error != AOTI_TORCH_SUCCESS) [[unlikely]] fail("torch failed to %s: %s", what, reason());
}

inline double number(StableIValue value) {
  double result;
  memcpy(&result, &value, sizeof result);
  return result;
}

inline int64_t integer(StableIValue value) { return (int64_t)value; }

inline bool boolean(StableIValue value) {
  bool result;
  memcpy(&result, &value, sizeof result);  // little-endian, as every platform of a variant is
  return result;
}

// An optional arrives as nullptr or as a value on the heap that the callee frees.
inline bool optional(StableIValue value, StableIValue *result) {
  auto *pointer = (StableIValue *)value;
  if (pointer == nullptr) return false;
  *result = *pointer;
  delete pointer;
  return true;
}

// A tensor with its handle, which it owns, and what C sees of it.
class Tensor {
 public:
  AkTensor view{};
  int32_t device_type = 0, device_index = 0;

  Tensor() = default;
  Tensor(const Tensor &) = delete;
  Tensor &operator=(const Tensor &) = delete;
  ~Tensor() { reset(nullptr); }

  void reset(AtenTensorHandle handle) {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
    handle_ = handle;
  }
  void take(StableIValue value) { reset((AtenTensorHandle)value); }
  void take_optional(StableIValue value) {
    StableIValue inner;
    if (optional(value, &inner)) take(inner);
  }
  AtenTensorHandle release() {
    AtenTensorHandle handle = handle_;
    handle_ = nullptr;
    return handle;
  }

  bool present() const { return handle_ != nullptr; }
  const AkTensor *pointer() const { return present() ? &view : nullptr; }
  int rank() const { return view.ndim; }
  int64_t size(int dim) const { return view.sizes[dim]; }
  int64_t back(int k) const { return view.sizes[view.ndim - k]; }  // the k-th size from the end
  int64_t count() const {
    int64_t n = 1;
    for (int i = 0; i < view.ndim; ++i) n *= view.sizes[i];
    return n;
  }

  void read() {
    if (!present()) return;
    int64_t rank, *sizes, *strides;
    const void *data;
    check(aoti_torch_get_dim(handle_, &rank), "read a tensor's rank");
    check(aoti_torch_get_sizes(handle_, &sizes), "read a tensor's sizes");
    check(aoti_torch_get_strides(handle_, &strides), "read a tensor's strides");
    check(torch_get_const_data_ptr(handle_, &data), "read a tensor's address");
    check(aoti_torch_get_dtype(handle_, &view.dtype), "read a tensor's dtype");
    check(aoti_torch_get_device_type(handle_, &device_type), "read a tensor's device");
    check(aoti_torch_get_device_index(handle_, &device_index), "read a tensor's device");
    view.data = const_cast<void *>(data);
    view.sizes = sizes;
    view.strides = strides;
    view.ndim = (int32_t)rank;
  }

  // New, contiguous, uninitialised.
  void allocate(int rank, const int64_t *sizes, int32_t dtype, const Tensor &like) {
    int64_t strides[kMaxRank];
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      strides[i] = step;
      step *= sizes[i] > 0 ? sizes[i] : 1;
    }
    AtenTensorHandle handle;
    if (aoti_torch_empty_strided(rank, sizes, strides, dtype, like.device_type, like.device_index, &handle) !=
        AOTI_TORCH_SUCCESS) [[unlikely]]
      fail(AK_OUT_OF_MEMORY_PREFIX "no memory for a tensor of %lld elements: %s", (long long)step, reason());
    reset(handle);
    read();
  }

  // Unlike torch's own notion, also in dimensions of one element or of an empty tensor, whose strides mean nothing: a
  // kernel need not know that.
  bool strictly_contiguous() const {
    int64_t step = 1;
    for (int i = view.ndim - 1; i >= 0; --i) {
      if (view.strides[i] != step) return false;
      step *= view.sizes[i] > 0 ? view.sizes[i] : 1;
    }
    return true;
  }

  // A contiguous, aligned copy in its place, where it is not so itself. The view is torch's again, not merged.
  void make_contiguous() {
    if (!present()) return;
    read();
    if (strictly_contiguous() && (uintptr_t)view.data % kAlignment == 0) return;
    Tensor copy;
    copy.allocate(rank(), view.sizes, view.dtype, *this);
    check(aoti_torch_copy_(copy.handle_, handle_, 0), "copy a tensor");
    reset(copy.release());
    read();
  }

  // Whether the leading dimensions are one dimension with one stride; if so, that stride.
  bool rows(int64_t *count, int64_t *stride) const {
    int64_t n = 1, step = 0, next = 0;
    bool open = true;
    for (int i = view.ndim - 2; i >= 0; --i) {
      if (view.sizes[i] == 1) continue;
      if (open) {
        step = view.strides[i];
        open = false;
      } else if (view.strides[i] != next) {
        return false;
      }
      n *= view.sizes[i];
      next = view.strides[i] * view.sizes[i];
    }
    *count = n;
    *stride = open ? (view.ndim > 0 ? view.sizes[view.ndim - 1] : 1) : step;
    return true;
  }

  void merge(int64_t count, int64_t stride) {
    merged_sizes_[1] = view.ndim > 0 ? view.sizes[view.ndim - 1] : 1;
    merged_strides_[1] = view.ndim > 0 ? view.strides[view.ndim - 1] : 1;
    merged_sizes_[0] = count;
    merged_strides_[0] = stride;
    view.sizes = merged_sizes_;
    view.strides = merged_strides_;
    view.ndim = 2;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
  int64_t merged_sizes_[2] = {}, merged_strides_[2] = {};
};

// The sizes of an output while they are put together.
struct Sizes {
  int64_t values[kMaxRank];
  int rank = 0;

  void push(int64_t size) {
    if (rank == kMaxRank) fail("an output has more than %d dimensions", kMaxRank);
    values[rank++] = size;
  }
};

// The size `value` is what the symbol stands for; the first use decides it.
inline bool bind(int64_t &symbol, int64_t value) {
  if (symbol < 0) symbol = value;
  return symbol == value;
}

inline bool same_leading(const Tensor &a, const Tensor &b, int trailing) {
  if (a.rank() != b.rank()) return false;
  for (int i = 0; i < a.rank() - trailing; ++i)
    if (a.size(i) != b.size(i)) return false;
  return true;
}

// Whether a tensor broadcasts to the sizes given.
inline bool broadcasts(const Tensor &tensor, std::initializer_list<int64_t> sizes) {
  int extra = (int)sizes.size() - tensor.rank();
  if (extra < 0) return false;
  for (int i = 0; i < tensor.rank(); ++i)
    if (tensor.size(i) != 1 && tensor.size(i) != sizes.begin()[i + extra]) return false;
  return true;
}

inline void shape_text(const Tensor &tensor, char *text, size_t room) {
  size_t used = 0;
  text[0] = 0;
  for (int i = 0; i < tensor.rank() && used + 24 < room; ++i)
    used += (size_t)snprintf(text + used, room - used, "%s%lld", i ? ", " : "", (long long)tensor.size(i));
}

[[noreturn, gnu::cold, gnu::noinline]] inline void bad_shape(const char *op, const char *name, const Tensor &tensor,
                                                             const char *wanted, const char *first_name,
                                                             const Tensor &first) {
  char own[256], other[256];
  shape_text(tensor, own, sizeof own);
  shape_text(first, other, sizeof other);
  fail("%s: %s has shape (%s), which does not fit %s where %s has shape (%s)", op, name, own, wanted, first_name, other);
}

inline void same_device(const char *op, const char *name, const Tensor &tensor, const Tensor &first) {
  if (tensor.present() &&
      (tensor.device_type != first.device_type || tensor.device_index != first.device_index)) [[unlikely]]
    fail("%s: %s is on another device than the first argument", op, name);
}

inline int64_t dimension(const char *op, int64_t dim, const Tensor &tensor) {
  int64_t rank = tensor.rank() > 0 ? tensor.rank() : 1;
  if (dim < -rank || dim >= rank) [[unlikely]]
    fail("%s: dimension %lld is out of range for a tensor of %d dimensions", op, (long long)dim, tensor.rank());
  return dim < 0 ? dim + rank : dim;
}

// Hands the leading dimensions of all tensors to C as one, if the strides of all allow it.
inline void merge_rows(Tensor *const *tensors, int n) {
  int64_t counts[8], strides[8];
  for (int i = 0; i < n; ++i)
    if (tensors[i]->present() && !tensors[i]->rows(&counts[i], &strides[i])) return;
  for (int i = 0; i < n; ++i)
    if (tensors[i]->present()) tensors[i]->merge(counts[i], strides[i]);
}

inline int32_t threads() {
  uint32_t n;
  check(torch_get_num_threads(&n), "tell the number of threads");
  return (int32_t)n;
}

// The codes of autokernel.h are torch's own; a torch that renumbered them would need a translation.
inline bool codes_hold() {
  return aoti_torch_dtype_uint8() == AK_U8 && aoti_torch_dtype_int32() == AK_I32 &&
         aoti_torch_dtype_int64() == AK_I64 && aoti_torch_dtype_float16() == AK_F16 &&
         aoti_torch_dtype_float32() == AK_F32 && aoti_torch_dtype_float64() == AK_F64 &&
         aoti_torch_dtype_bool() == AK_BOOL && aoti_torch_dtype_bfloat16() == AK_BF16 &&
         aoti_torch_dtype_float8_e4m3fn() == AK_F8E4M3;
}

#ifdef USE_CUDA
extern "C" const char *cudaGetErrorString(int error);

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) { check(aoti_torch_create_device_guard(device, &guard_), "set the device"); }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;
  ~DeviceGuard() { aoti_torch_delete_device_guard(guard_); }

 private:
  DeviceGuardHandle guard_ = nullptr;
};
#endif

inline void context(AkContext *ctx, const Tensor &first) {
  *ctx = AkContext{};
  ctx->device = first.device_index;
#ifdef USE_CUDA
  check(aoti_torch_get_current_cuda_stream(first.device_index, &ctx->stream), "tell the current stream");
  ctx->num_threads = 1;
#else
  ctx->num_threads = threads();
#endif
}

inline void workspace(AkContext *ctx, Tensor *memory, int64_t bytes, const Tensor &first) {
  ctx->workspace = nullptr;
  ctx->workspace_bytes = 0;
  if (bytes <= 0) return;
  memory->allocate(1, &bytes, AK_U8, first);
  ctx->workspace = memory->view.data;
  ctx->workspace_bytes = bytes;
}

inline void finish(const char *op, int code) {
  if (code == AK_OK) [[likely]] return;
  if (code == AK_UNSUPPORTED) fail(AK_UNSUPPORTED_PREFIX "%s: this kernel does not support these arguments", op);
  if (code == AK_NEED_CONTIGUOUS) fail("%s: the kernel refuses contiguous arguments as not contiguous", op);
#ifdef USE_CUDA
  if (code > 0) fail("%s: CUDA error: %s", op, cudaGetErrorString(code));
#endif
  fail("%s: the kernel returned error %d", op, code);
}

}  // namespace ak
