"""How good images are: LPIPS, FID and its kin, PSNR and SSIM, on any number of devices."""
