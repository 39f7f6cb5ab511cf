// The table of loops, one per storage type, filled once per instruction set and chosen when the library is loaded.
#pragma once

#include <cstdint>

#include "isa.h"

enum Storage { kFloat, kDouble, kBFloat16, kHalf, kStorages };

struct NormForward;
struct NormBackward;
struct ActivationForward;
struct ActivationBackward;
struct GatedForward;
struct GatedBackward;
struct Dropout;
struct Rotary;

struct Loops {
  const char* isa;
  void (*norm_forward[kStorages])(const NormForward&, int64_t begin_row, int64_t end_row);
  void (*norm_backward[kStorages])(const NormBackward&, int64_t begin_chunk, int64_t end_chunk);
  void (*activation_forward[kStorages])(const ActivationForward&, int64_t begin_row, int64_t end_row);
  void (*activation_backward[kStorages])(const ActivationBackward&, int64_t begin_row, int64_t end_row, void* sums);
  void (*gated_forward[kStorages])(const GatedForward&, int64_t begin_row, int64_t end_row);
  void (*gated_backward[kStorages])(const GatedBackward&, int64_t begin_row, int64_t end_row, void* sums);
  void (*dropout[kStorages])(const Dropout&, int64_t begin_row, int64_t end_row);
  void (*rotary[kStorages])(const Rotary&, int64_t begin_row, int64_t end_row);
};

// Fills a table; each source of loops adds its own.
namespace FUSIBLE_ISA {
void add_activation(Loops&);
void add_dropout(Loops&);
void add_gated(Loops&);
void add_norm(Loops&);
void add_rotary(Loops&);
void fill(Loops&);
}  // namespace FUSIBLE_ISA

// The table for this machine.
const Loops& loops();
