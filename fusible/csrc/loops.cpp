// Fills the table of one instruction set.
#include "loops.h"

#define FUSIBLE_TEXT_(x) #x
#define FUSIBLE_TEXT(x) FUSIBLE_TEXT_(x)

namespace FUSIBLE_ISA {

void fill(Loops& loops) {
  loops.isa = FUSIBLE_TEXT(FUSIBLE_ISA);
  add_activation(loops);
  add_dropout(loops);
  add_gated(loops);
  add_norm(loops);
  add_rotary(loops);
}

}  // namespace FUSIBLE_ISA
